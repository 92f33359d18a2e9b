"""Steps that compute prompts, alone or beside decodes, as CUDA graphs.

The host needs longer to launch the kernels of such a step than the device to compute it, if the
step has few tokens. There is a graph for each of some numbers of tokens and for two bounds on the
context; a step is padded up to the next. How many sequences decode is read on the device, so one
graph serves every mixture. The model computes longer steps without graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.attention_backend import AttentionMetadata, LayerCache
from ..core.kv_cache_groups import ONE_GROUP, KVLayout
from ..models.base import CausalModel, ForwardBatch, of_layers
from .capture import Capture, Run, SharedLogits, at_least

# Multiples of this many tokens are captured: a token takes the device some microseconds.
TOKENS_STEP = 64
MOST_TOKENS = 1024
# Steps with more prompts have no graph: attention's grid grows with this bound.
MOST_PROMPTS = 16
CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class MixedSizes:
    """The numbers of tokens and the longest contexts for which there are graphs, both ascending."""

    tokens: tuple[int, ...]
    contexts: tuple[int, ...]

    @classmethod
    def up_to(cls, max_num_batched_tokens: int, max_model_len: int) -> "MixedSizes":
        most = min(MOST_TOKENS, max_num_batched_tokens)
        tokens = tuple(range(TOKENS_STEP, most + 1, TOKENS_STEP))
        contexts = (CONTEXT, max_model_len) if CONTEXT < max_model_len else (max_model_len,)
        return cls(tokens, contexts)

    def top(self) -> "MixedSizes":
        """The largest number of tokens with the longest context."""
        return MixedSizes(self.tokens[-1:], self.contexts[-1:])

    @property
    def count(self) -> int:
        return len(self.tokens) * len(self.contexts)


class StaticMixedBatch:
    """Buffers of fixed addresses for a step of up to `tokens` tokens, of up to `sequences`
    sequences. No more than MOST_PROMPTS of them may compute prompts.

    Padding tokens belong to no sequence, and their slots are below 0. Padding sequences have no
    tokens. `blocks` is the length of a block table. A step samples for its sequences, or with
    `every_row` returns the rows of all tokens.
    """

    def __init__(
        self,
        tokens: int,
        sequences: int,
        blocks: int,
        device: torch.device,
        layout: KVLayout = ONE_GROUP,
        every_row: bool = False,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows = sequences + MOST_PROMPTS
        self._sequences, self._layout = sequences, layout
        self._most_rows = tokens if every_row else sequences
        self._ids, self._positions = zeros(tokens), zeros(tokens)
        self._logits_rows = zeros(self._most_rows)
        self._starts = zeros(rows + 1, dtype=torch.int32)
        self._lens = zeros(rows, dtype=torch.int32)
        self._decode_count = zeros(1, dtype=torch.int32)
        groups = range(layout.groups.count)
        self._slots = [zeros(tokens).fill_(-1) for _ in groups]
        self._tables = [zeros(rows, blocks, dtype=torch.int32) for _ in groups]

    @property
    def num_bytes(self) -> int:
        shared = (self._ids, self._positions, self._logits_rows, self._starts, self._lens)
        return sum(part.nbytes for part in (*shared, *self._slots, *self._tables))

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether the buffers can hold the batch, if it has few enough tokens."""
        metadata = batch.metadata
        sequences = len(metadata.seq_lens)
        return (
            batch.lora is None
            and batch.states is None
            and batch.vision is None
            and sequences <= self._sequences
            and sequences - metadata.num_decodes <= MOST_PROMPTS
            and len(batch.logits_rows) <= min(self._most_rows, len(batch.input_ids))
        )

    def fill(self, batch: ForwardBatch, tokens: int) -> None:
        """Copies a step's inputs, and pads them to `tokens` tokens."""
        metadata, count = batch.metadata, len(batch.input_ids)
        sequences = len(metadata.seq_lens)
        self._ids[:count].copy_(batch.input_ids)
        self._positions[:count].copy_(batch.positions)
        _fill(self._logits_rows, batch.logits_rows, 0)
        _fill(self._starts, metadata.query_start, count)
        _fill(self._lens, metadata.seq_lens, 0)
        self._decode_count.fill_(metadata.num_decodes)
        for layer, slots, tables in zip(
            self._layout.layer_of_each_group, self._slots, self._tables, strict=True
        ):
            own = batch.metadata_of(layer)
            _fill(slots[:tokens], own.slots, -1)
            tables[:sequences, : own.block_tables.shape[1]].copy_(own.block_tables)

    def view(self, tokens: int, context: int) -> ForwardBatch:
        """The first `tokens` tokens as a model's input."""
        decodes = min(self._sequences, tokens)
        rows = decodes + MOST_PROMPTS
        groups = [
            AttentionMetadata(
                query_start=self._starts[: rows + 1],
                seq_lens=self._lens[:rows],
                block_tables=tables[:rows],
                slots=slots[:tokens],
                num_decodes=decodes,
                max_query_len=tokens,
                max_seq_len=context,
                decode_count=self._decode_count,
            )
            for slots, tables in zip(self._slots, self._tables, strict=True)
        ]
        return ForwardBatch(
            self._ids[:tokens],
            self._positions[:tokens],
            self._logits_rows[: min(self._most_rows, tokens)],
            groups[0],
            layers=of_layers(groups, self._layout),
        )


def _fill(target: torch.Tensor, source: torch.Tensor, padding: int) -> None:
    target[: len(source)].copy_(source)
    target[len(source) :].fill_(padding)


class MixedSteps:
    """A model's steps with prompts over `caches`, recorded by the constructor, the largest first,
    as they share memory and `logits`."""

    def __init__(
        self,
        model: CausalModel,
        caches: Sequence[LayerCache],
        sizes: MixedSizes,
        batch: StaticMixedBatch,
        capture: Capture,
        logits: SharedLogits,
    ) -> None:
        self._model, self._caches, self._logits = model, caches, logits
        self._sizes, self._batch = sizes, batch
        self._graphs = {
            (tokens, context): capture(self._step(tokens, context))
            for tokens in reversed(sizes.tokens)
            for context in reversed(sizes.contexts)
        }

    def forward(self, batch: ForwardBatch) -> torch.Tensor | None:
        """The logits of a step; None if it has no graph."""
        tokens = at_least(self._sizes.tokens, len(batch.input_ids))
        context = at_least(self._sizes.contexts, batch.metadata.max_seq_len)
        if tokens is None or context is None or not self._batch.takes(batch):
            return None
        self._batch.fill(batch, tokens)
        return self._graphs[tokens, context]()[: len(batch.logits_rows)]

    def _step(self, tokens: int, context: int) -> Run:
        view = self._batch.view(tokens, context)
        return lambda: self._logits.keep(self._model.forward(view, self._caches))
