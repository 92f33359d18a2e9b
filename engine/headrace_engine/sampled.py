"""What a step sampled, on its way from the device to the host.

The tokens stay on the device as well, where the next step's input takes them from.
"""

from dataclasses import dataclass
from math import isfinite

import torch

from .logprobs import LogprobEntries
from .outputs import SampledToken, TokenLogprobs
from .transfer import all_to_host


@dataclass(frozen=True, slots=True)
class SampledRows:
    """`tokens` int64 [R] and `best` [R], the largest logits, NaN or infinite where a row is broken.

    `entries` are the log probabilities of the rows `asked`; None where there are none.
    """

    tokens: torch.Tensor
    best: torch.Tensor
    asked: list[int]
    entries: LogprobEntries | None

    def to_host(self) -> "SampledRows":
        """Begins to copy all of it; to be read when the device is through with that."""
        entries = None if self.entries is None else self.entries.to_host()
        tokens, best = all_to_host((self.tokens, self.best))
        return SampledRows(tokens, best, self.asked, entries)

    def read(self) -> tuple[SampledToken | None, ...]:
        """One token a row, None for a broken one."""
        ids = self.tokens.tolist()
        broken = [row for row, value in enumerate(self.best.tolist()) if not isfinite(value)]
        if self.entries is None and not broken:
            return tuple(map(SampledToken, ids))
        found: dict[int, TokenLogprobs] = {}
        if self.entries is not None:
            found = dict(zip(self.asked, self.entries.read(), strict=True))
        return tuple(
            None if index in broken else SampledToken(token, found.get(index))
            for index, token in enumerate(ids)
        )
