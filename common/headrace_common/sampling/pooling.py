"""Parameters of embeddings, as the offline API, the gateway and the engine use them.

Only the standard library, as for the sampling parameters. Only ranges that no model exceeds are
checked here; the engine knows the model's own range.
"""

from dataclasses import dataclass

from .params import SamplingError

MAX_EMBEDDING_SIZE = 65_536
# The most numbers of all vectors of one input, of models that make one for each token.
MAX_VECTORS_SIZE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Requests vectors instead of tokens. `dimensions` None: the model's own length.

    Raises SamplingError for a value out of range.
    """

    dimensions: int | None = None

    def __post_init__(self) -> None:
        size = self.dimensions
        if size is not None and (type(size) is not int or not 0 < size <= MAX_EMBEDDING_SIZE):
            raise SamplingError(
                "dimensions", f"must be a whole number from 1 to {MAX_EMBEDDING_SIZE}, not {size!r}"
            )
