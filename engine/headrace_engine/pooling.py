"""Embeddings: one vector of a prompt out of its tokens' last hidden states.

Arithmetic is float32. Decides nothing about steps and runs no model.
"""

from weakref import WeakKeyDictionary

import torch
from torch.nn import functional as F

from .plan import StepPlan
from .pooler_config import PoolerConfig, PoolingType
from .request import Sequence


class Pooler:
    """Pools a step's hidden states. Used by one thread.

    Of prompts that take several steps it keeps what it has seen, as long as their sequences live.
    """

    def __init__(self, config: PoolerConfig) -> None:
        self.config = config
        self._seen: WeakKeyDictionary[Sequence, torch.Tensor] = WeakKeyDictionary()

    def rows(self, last: torch.Tensor, tokens: int) -> torch.Tensor:
        """The tokens whose hidden states are wanted: `last` those of prompts that end, or all."""
        if self.config.needs_all_tokens:
            return torch.arange(tokens, device=last.device)
        return last

    def pool(self, plan: StepPlan, hidden: torch.Tensor) -> tuple[bytes | None, ...]:
        """A vector for each prompt that ends in this step, in the plan's order.

        `hidden` [R, H] are the states of `rows`. A vector is little-endian float32; None where it
        would not be finite.
        """
        ending = [item.sequence for item in plan.scheduled if item.samples]
        pooled = hidden.float()
        if self.config.needs_all_tokens:
            pooled = self._gather(plan, pooled)
        assert len(pooled) == len(ending), "a vector for each prompt that ends"
        return tuple(
            self._finish(sequence, vector)
            for sequence, vector in zip(ending, pooled.cpu(), strict=True)
        )

    def _gather(self, plan: StepPlan, hidden: torch.Tensor) -> torch.Tensor:
        complete: list[torch.Tensor] = []
        at = 0
        for item in plan.scheduled:
            run = hidden[at : at + item.length]
            at += item.length
            state = self._merge(item.sequence, item.start, run)
            if item.samples:
                self._seen.pop(item.sequence, None)
                mean = self.config.pooling_type is PoolingType.MEAN
                complete.append(state / (item.start + item.length) if mean else state)
            else:
                self._seen[item.sequence] = state
        return torch.stack(complete) if complete else hidden[:0]

    def _merge(self, sequence: Sequence, start: int, run: torch.Tensor) -> torch.Tensor:
        """The sum of all tokens so far, or the first token's state."""
        mean = self.config.pooling_type is PoolingType.MEAN
        new = run.sum(dim=0) if mean else run[0]
        if start == 0:
            return new.clone()
        before = self._seen.get(sequence)
        if before is None:
            return new.clone()
        return before + new if mean else before

    def _finish(self, sequence: Sequence, vector: torch.Tensor) -> bytes | None:
        pooling = sequence.request.pooling
        if pooling is not None and pooling.dimensions is not None:
            vector = vector[: pooling.dimensions]
        if self.config.normalize:
            vector = F.normalize(vector, dim=0)
        if not bool(torch.isfinite(vector).all()):
            return None
        return vector.numpy().astype("<f4").tobytes()
