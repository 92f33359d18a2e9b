"""Emulates CUDA graphs without a GPU: a replay runs the step again."""

import torch

from headrace_engine.attention.reference import ReferenceBackend
from headrace_engine.core.attention_backend import AttentionMetadata, LayerCache, LayerParams
from headrace_engine.cuda_graphs.capture import Run


class PaddedReference(ReferenceBackend):
    """The reference backend, extended to skip padding, as backends of recorded steps must."""

    skips_padding = True

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: LayerParams,
    ) -> torch.Tensor:
        kept = int((metadata.slots >= 0).sum())
        sequences = int((metadata.query_start[:-1] < kept).sum())
        assert metadata.seq_lens[sequences:].eq(0).all()
        real = AttentionMetadata(
            metadata.query_start[: sequences + 1],
            metadata.seq_lens[:sequences],
            metadata.block_tables,
            metadata.slots[:kept],
            metadata.num_decodes,
            metadata.max_query_len,
            metadata.max_seq_len,
        )
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        rows = (query[:kept], key[:kept], value[:kept])
        output[:kept] = super().forward(*rows, cache, real, params)
        return output


class CountedReference(PaddedReference):
    """A reference backend whose recorded steps may have prompts."""

    counts_decodes = True


class Replays:
    """Counts how often each recording is used."""

    def __init__(self) -> None:
        self.recorded: list[torch.Size] = []
        self.used: list[int] = []

    def __call__(self, run: Run) -> Run:
        self.recorded.append(run().shape)

        def replay() -> torch.Tensor:
            logits = run()
            self.used.append(len(logits))
            return logits

        return replay
