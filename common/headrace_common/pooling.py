"""How an embedding is asked for, as the offline API, the gateway and the engine all see it.

Plain standard library, as the sampling parameters are. What a model can give is the engine's to
say: only ranges that no model exceeds are checked here.
"""

from dataclasses import dataclass

from .sampling import SamplingError

MAX_EMBEDDING_SIZE = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Asks for one vector instead of tokens. `dimensions` None: as long as the model makes it.

    Raises SamplingError for a value out of range.
    """

    dimensions: int | None = None

    def __post_init__(self) -> None:
        size = self.dimensions
        if size is not None and (type(size) is not int or not 0 < size <= MAX_EMBEDDING_SIZE):
            raise SamplingError(
                "dimensions", f"must be a whole number from 1 to {MAX_EMBEDDING_SIZE}, not {size!r}"
            )
