"""Runs a draft head. After each step the head reads the step's tokens; before the next step it
makes drafts.

The target's blocks also hold the head's KV, as if the head were further layers: it is shared,
copied, swapped and freed with its block. The head's KV of a position also depends on the token
after the position. So the last position of a shared prefix has the KV of the sequence that computed
it. This may lower the acceptance of drafts and changes nothing else.

Drafts after the first need KV at positions for which the target may have no block yet. Scratch
blocks after the pool's blocks hold it: a copy of the sequence's last block, then empty ones.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from ..core.attention_backend import AttentionMetadata, LayerCache
from ..core.config import EngineConfig
from ..core.outputs import SampledToken
from ..core.request import Sequence
from ..core.step_plan import SampleRow, ScheduledSequence, SchedulerOutput
from ..device.transfer import Transfer
from ..models.base import ForwardBatch
from ..models.draft_heads.base import DraftHead, HeadStates
from ..models.draft_heads.target import HeadTarget
from ..models.placed_model import PlacedModel
from ..sampling.sampler import Sampler
from .input_batch import build

Ints = npt.NDArray[np.int64]
Sampled = tuple[tuple[SampledToken, ...] | None, ...]
# The token after a sequence whose logits were broken. The sequence ends, so it is never used.
NO_TOKEN = 0


class DraftHeadRunner:
    """The draft head of a placed model. It reads the states that `target` keeps after a step."""

    def __init__(
        self,
        head: DraftHead,
        target: HeadTarget,
        placed: PlacedModel,
        config: EngineConfig,
        sampler: Sampler,
    ) -> None:
        assert config.draft_head is not None, "the configuration has no draft head"
        self._head, self.target, self._sampler = head, target, sampler
        self._placed, self._device = placed, placed.device
        self._transfer = Transfer(placed.device)
        self._block_size = config.block_size
        # The last block may have room for no draft.
        self._scratch_rows = 1 + -(-config.draft_head.num_speculative_tokens // config.block_size)
        self.scratch_blocks = config.max_num_seqs * self._scratch_rows
        self._caches: tuple[LayerCache, ...] = ()
        self._first_scratch = 0
        self._read = _NOTHING
        self._current = _NOTHING
        # By sequence: its row in `_read`, and the number of its tokens then.
        self._ready: dict[Sequence, tuple[int, int]] = {}
        # By sequence: its row in `_current`, and its first scratch block.
        self._rows: dict[Sequence, int] = {}
        self._scratch: dict[Sequence, int] = {}

    def use(self, caches: tuple[LayerCache, ...], num_blocks: int) -> None:
        """Takes KV memory of `num_blocks` blocks, followed by the scratch blocks."""
        self._caches, self._first_scratch = caches, num_blocks

    def read(self, scheduler_output: SchedulerOutput, sampled: Sampled) -> None:
        """Reads the tokens that the target has just computed, without rejected drafts."""
        self._ready.clear()
        found = list(_accepted(scheduler_output, sampled))
        with torch.inference_mode():
            batch, hidden = self._batch(scheduler_output, found)
            self._read = self._head.forward(batch, hidden, self._caches)
        for item, _, samples in found:
            if samples:
                known = item.start + item.length + len(item.drafts)
                self._ready[item.sequence] = len(self._ready), known + 1

    def is_ready(self, sequence: Sequence) -> bool:
        ready = self._ready.get(sequence)
        return ready is not None and ready[1] == len(sequence.token_ids)

    def draft(self, rows: list[SampleRow]) -> tuple[int | None, ...]:
        sequences = [row.sequence for row in rows]
        with torch.inference_mode():
            if rows[0].ahead:
                self._current = self._step(rows)
            else:
                chosen = [self._ready[each][0] for each in sequences]
                self._current = _rows(self._read, self._ints(chosen))
                self._scratch.clear()
            self._rows = {each: row for row, each in enumerate(sequences)}
            logits = self._head.logits(self._current.normed)
            tokens = self._sampler.sample(logits, rows)
        return tuple(None if token is None else token.token_id for token in tokens)

    def _step(self, rows: list[SampleRow]) -> HeadStates:
        """Runs the head on the last draft of each row."""
        if not self._scratch:
            self._copy_last_blocks([row.sequence for row in rows])
        before = self._ints([self._rows[row.sequence] for row in rows])
        hidden = self._current.hidden.index_select(0, before)
        return self._head.forward(self._draft_batch(rows), hidden, self._caches)

    def _copy_last_blocks(self, sequences: list[Sequence]) -> None:
        """Gives each sequence its scratch blocks, the first of which continues its last block."""
        pairs: list[tuple[int, int]] = []
        for place, sequence in enumerate(sequences):
            self._scratch[sequence] = self._first_scratch + place * self._scratch_rows
            full, started = divmod(len(sequence.token_ids) - 1, self._block_size)
            if started:
                pairs.append((sequence.block_table[full], self._scratch[sequence]))
        if pairs:
            self._placed.copy_head_blocks(self._caches, tuple(pairs))

    def _draft_batch(self, rows: list[SampleRow]) -> ForwardBatch:
        """A batch with one token for each row: its last draft, one position before the next."""
        size, count = self._block_size, len(rows)
        positions = np.array([len(row.token_ids) - 2 for row in rows], dtype=np.int64)
        tables = np.zeros((count, int(positions.max()) // size + 1), dtype=np.int64)
        for index, row in enumerate(rows):
            sequence = row.sequence
            full, end = (len(sequence.token_ids) - 1) // size, int(positions[index]) // size + 1
            tables[index, :full] = sequence.block_table[:full]
            tables[index, full:end] = self._scratch[sequence] + np.arange(end - full)
        every = np.arange(count)
        slots = tables[every, positions // size] * size + positions % size
        ids = np.array([row.ahead[-1] for row in rows], dtype=np.int64)
        starts = np.arange(count + 1, dtype=np.int32)
        lens = (positions + 1).astype(np.int32)
        tensors = self._transfer(
            (ids, positions, every, starts, lens, tables.astype(np.int32), slots)
        )
        metadata = AttentionMetadata(
            query_start=tensors[3],
            seq_lens=tensors[4],
            block_tables=tensors[5],
            slots=tensors[6],
            num_decodes=count,
            max_query_len=1,
            max_seq_len=int(lens.max()),
        )
        return ForwardBatch(tensors[0], tensors[1], tensors[2], metadata)

    def _batch(
        self,
        scheduler_output: SchedulerOutput,
        found: list[tuple[ScheduledSequence, int, bool]],
    ) -> tuple[ForwardBatch, torch.Tensor]:
        """The head's input: each position with the token after it and the target's state."""
        items = tuple(item for item, _, _ in found)
        lengths = np.array([item.length + len(item.drafts) for item in items], dtype=np.int64)
        planned = np.array(
            [item.length + len(item.drafts) for item in scheduler_output.scheduled], dtype=np.int64
        )
        ends, total = np.cumsum(lengths), int(lengths.sum())
        forward = build(
            SchedulerOutput(items, (), total), self._block_size, self._device, self._transfer
        ).forward
        states = self.target.states
        if total < int(planned.sum()):
            begins = np.cumsum(planned) - planned
            kept = np.arange(total) + np.repeat(begins - (ends - lengths), lengths)
            states = states.index_select(0, self._ints(kept))
        samples = np.array([each for _, _, each in found], dtype=bool)
        ids = forward.input_ids.roll(-1)
        last = np.array([following for _, following, _ in found], dtype=np.int64)
        places, following, rows = self._transfer((ends - 1, last, ends[samples] - 1))
        ids[places] = following
        batch = replace(forward, input_ids=ids, logits_rows=rows)
        return batch, self._head.combine(states)

    def _ints(self, values: list[int] | Ints) -> torch.Tensor:
        (moved,) = self._transfer((np.array(values, dtype=np.int64),))
        return moved


def _accepted(
    scheduler_output: SchedulerOutput, sampled: Sampled
) -> Iterator[tuple[ScheduledSequence, int, bool]]:
    """Yields each scheduled sequence with its accepted drafts only, the token after them, and
    whether that token was sampled in this step."""
    tokens = iter(sampled)
    for item in scheduler_output.scheduled:
        known, end = item.sequence.token_ids, item.start + item.length
        if not item.samples:
            yield item._replace(drafts=()), known[end] if end < len(known) else NO_TOKEN, False
            continue
        new = next(tokens)
        if new is None:
            yield item._replace(drafts=()), NO_TOKEN, False
            continue
        ids = tuple([token.token_id for token in new])
        yield item._replace(drafts=ids[:-1]), ids[-1], True


def _rows(states: HeadStates, rows: torch.Tensor) -> HeadStates:
    return HeadStates(states.hidden.index_select(0, rows), states.normed.index_select(0, rows))


_NOTHING = HeadStates(torch.empty(0, 0), torch.empty(0, 0))
