"""Pools embeddings: one vector for a prompt from the last hidden states of its tokens, or one for
each of its tokens.

Arithmetic is float32.
"""

from weakref import WeakKeyDictionary

import torch
from torch.nn import functional as F

from ..core.pooler_config import PoolerConfig, PoolingType
from ..core.request import Sequence
from ..core.step_plan import SchedulerOutput


class Pooler:
    """Pools a step's hidden states. Used by one thread.

    For prompts that take several steps it keeps partial results while their sequences are alive.
    """

    def __init__(self, config: PoolerConfig) -> None:
        self.config = config
        self._seen: WeakKeyDictionary[Sequence, torch.Tensor] = WeakKeyDictionary()

    def rows(self, last: torch.Tensor, tokens: int) -> torch.Tensor:
        """The tokens whose hidden states are needed: the `last` of each complete prompt, or all."""
        if self.config.needs_all_tokens:
            return torch.arange(tokens, device=last.device)
        return last

    def pool(
        self, scheduler_output: SchedulerOutput, hidden: torch.Tensor
    ) -> tuple[bytes | None, ...]:
        """A vector for each prompt that ends in this step, in the order of the sequences, or the
        vectors of all its tokens, one after the other.

        `hidden` [R, H] are the states of `rows`. Vectors are packed little-endian float32; None if
        one is not finite.
        """
        ending = [item.sequence for item in scheduler_output.scheduled if item.samples]
        pooled = (
            self._gather(scheduler_output, hidden.float())
            if self.config.needs_all_tokens
            else list(hidden.float().cpu())
        )
        return tuple(
            self._finish(sequence, vector) for sequence, vector in zip(ending, pooled, strict=True)
        )

    def _gather(
        self, scheduler_output: SchedulerOutput, hidden: torch.Tensor
    ) -> list[torch.Tensor]:
        complete: list[torch.Tensor] = []
        at = 0
        for item in scheduler_output.scheduled:
            run = hidden[at : at + item.length]
            at += item.length
            state = self._merge(item.sequence, item.start, run)
            if item.samples:
                self._seen.pop(item.sequence, None)
                mean = self.config.pooling_type is PoolingType.MEAN
                complete.append(state / (item.start + item.length) if mean else state)
            else:
                self._seen[item.sequence] = state
        if self.config.of_tokens:
            return [states.cpu() for states in complete]
        return list(torch.stack(complete).cpu()) if complete else []

    def _merge(self, sequence: Sequence, start: int, run: torch.Tensor) -> torch.Tensor:
        """The sum of all tokens so far, the states of all, or the first token's."""
        before = None if start == 0 else self._seen.get(sequence)
        if self.config.of_tokens:
            return run.clone() if before is None else torch.cat([before, run])
        mean = self.config.pooling_type is PoolingType.MEAN
        new = run.sum(dim=0) if mean else run[0]
        if before is None:
            return new.clone()
        return before + new if mean else before

    def _finish(self, sequence: Sequence, vector: torch.Tensor) -> bytes | None:
        pooling = sequence.request.pooling
        if pooling is not None and pooling.dimensions is not None:
            vector = vector[..., : pooling.dimensions]
        if self.config.normalize:
            vector = F.normalize(vector, dim=-1)
        if not bool(torch.isfinite(vector).all()):
            return None
        return vector.numpy().astype("<f4").tobytes()
