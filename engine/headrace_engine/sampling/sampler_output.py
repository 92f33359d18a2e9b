"""The sampled tokens of a step, and their copy from the device to the host.

They stay on the device as well, where the next step's input reads them.
"""

from dataclasses import dataclass
from math import isfinite

import torch

from ..core.outputs import SampledToken, TokenLogprobs
from ..device.transfer import all_to_host
from .logprobs import LogprobEntries


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Tokens int64 [R] with their log probabilities.

    `best` [R] are the largest logits, NaN or infinite in broken rows. `entries` are the log
    probabilities of the rows `asked`; None if there are none.
    """

    tokens: torch.Tensor
    best: torch.Tensor
    asked: list[int]
    entries: LogprobEntries | None

    def to_host(self) -> "SamplerOutput":
        """Starts the copy to the host; `read` it when the device has finished."""
        entries = None if self.entries is None else self.entries.to_host()
        tokens, best = all_to_host((self.tokens, self.best))
        return SamplerOutput(tokens, best, self.asked, entries)

    def read(self) -> tuple[SampledToken | None, ...]:
        """One token for each row; None for a broken row."""
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
