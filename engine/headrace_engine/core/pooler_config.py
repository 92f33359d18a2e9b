"""How an embedding model pools, and which lengths of vectors it offers. Computes nothing."""

from dataclasses import dataclass
from enum import StrEnum

from headrace_common.sampling.pooling import MAX_VECTORS_SIZE

from .errors import RequestError


class PoolingType(StrEnum):
    LAST = "LAST"
    MEAN = "MEAN"
    CLS = "CLS"
    ALL = "ALL"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """How vectors of `size` numbers are computed: one for a prompt, or with ALL one for each of its
    tokens. `matryoshka_dimensions` are the shorter lengths
    that requests may ask for; None: any, for a model trained so; empty: none. In a `bidirectional`
    model tokens attend to their whole prompt, so one step must compute all of it."""

    size: int
    pooling_type: PoolingType = PoolingType.LAST
    normalize: bool = True
    matryoshka_dimensions: frozenset[int] | None = frozenset()
    bidirectional: bool = False

    @property
    def needs_all_tokens(self) -> bool:
        """Whether pooling needs more than the hidden state of a prompt's last token."""
        return self.pooling_type is not PoolingType.LAST

    @property
    def of_tokens(self) -> bool:
        """Whether each token has a vector, instead of the prompt."""
        return self.pooling_type is PoolingType.ALL

    @property
    def reuses_prefixes(self) -> bool:
        """Whether tokens may come from a prefix cache instead of being computed."""
        return not (self.bidirectional or self.needs_all_tokens)

    def check_prompt(self, tokens: int) -> None:
        """Raises RequestError for a prompt that would have too many vectors."""
        most = MAX_VECTORS_SIZE // self.size
        if self.of_tokens and tokens > most:
            raise RequestError(
                f"prompt_token_ids has {tokens} tokens, but a prompt has at most {most} vectors of "
                f"{self.size} numbers: send at most that many tokens"
            )

    def check(self, dimensions: int | None) -> None:
        """Raises RequestError for a length that the model does not offer."""
        if dimensions is None or dimensions == self.size:
            return
        allowed = self.matryoshka_dimensions
        if allowed is not None and not allowed:
            raise RequestError(
                f"dimensions: this model's vectors have {self.size} numbers and cannot be "
                f"shortened, so {dimensions} is not possible: leave it out"
            )
        if dimensions > self.size or (allowed is not None and dimensions not in allowed):
            choices = f"1 to {self.size}" if allowed is None else ", ".join(map(str, _all(self)))
            raise RequestError(f"dimensions: {dimensions} is not one of {choices}")


def _all(config: PoolerConfig) -> list[int]:
    return sorted({*(config.matryoshka_dimensions or ()), config.size})
