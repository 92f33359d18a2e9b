"""Ragged steps of attention with random keys, for any backend, and the exact result of each."""

from dataclasses import dataclass, replace

import torch

from headrace_engine.core.attention_backend import (
    AttentionBackend,
    AttentionMetadata,
    KVSpec,
    LayerCache,
    LayerParams,
)

CPU = torch.device("cpu")
BLOCKS = 40


def dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: LayerParams
) -> torch.Tensor:
    """Computes the attention of the last n positions in float64, head by head and query by
    query."""
    n, heads, _ = query.shape
    length, group = len(keys), heads // keys.shape[1]
    output = torch.zeros(n, heads, values.shape[2], dtype=torch.float64)
    for row in range(n):
        position = length - n + row
        first = 0 if params.sliding_window is None else position + 1 - params.sliding_window
        if params.chunk is not None:
            first = position // params.chunk * params.chunk
        seen = slice(max(0, first), position + 1)
        for head in range(heads):
            scores = keys[seen, head // group].double() @ query[row, head].double() * params.scale
            if params.softcap is not None:
                scores = torch.tanh(scores / params.softcap) * params.softcap
            if params.sinks is not None:
                scores = torch.cat([scores, params.sinks[head : head + 1].double()])
            shares = scores.softmax(0)[: position + 1 - seen.start]
            output[row, head] = shares @ values[seen, head // group].double()
    return output


@dataclass(frozen=True)
class Case:
    """Sequences of (computed, new) tokens, with a layer's shape."""

    runs: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    block_size: int = 4
    params: LayerParams = LayerParams(scale=0.2)


# Sinks of four heads: like a score, far below all scores, without any weight, far above all scores.
SINKS = torch.tensor([0.5, -3.0, -200.0, 200.0])

CASES = {
    "decode": Case(((0, 1), (9, 1), (16, 1), (30, 1))),
    "prefill": Case(((0, 7), (0, 1), (0, 33))),
    "mixed": Case(((5, 1), (12, 1), (8, 9), (0, 17), (3, 2))),
    "multi-head": Case(((5, 1), (2, 6)), heads=3, kv_heads=3),
    "multi-query": Case(((5, 1), (2, 6)), heads=6, kv_heads=1, dim=64),
    "odd head": Case(((5, 1), (2, 6)), dim=20),
    "large blocks": Case(((5, 1), (0, 30), (17, 3)), block_size=16),
    "odd blocks": Case(((5, 1), (0, 30), (17, 3)), block_size=5),
    "window": Case(((5, 1), (29, 1), (0, 20), (11, 7)), params=LayerParams(0.2, None, 6)),
    "window of one": Case(((5, 1), (0, 9)), params=LayerParams(0.2, None, 1)),
    "chunks": Case(
        ((5, 1), (24, 1), (29, 1), (0, 20), (11, 7), (7, 26)), params=LayerParams(0.2, chunk=6)
    ),
    "chunks of blocks": Case(((15, 1), (16, 1), (3, 30)), params=LayerParams(0.2, chunk=8)),
    "softcap": Case(((5, 1), (0, 20)), params=LayerParams(0.7, 3.0)),
    "softcap in a window": Case(((25, 1), (0, 20)), params=LayerParams(0.7, 3.0, 5)),
    "large scale": Case(((5, 1), (0, 20)), params=LayerParams(4.0)),
    "sinks": Case(((5, 1), (0, 20)), params=LayerParams(0.2, sinks=SINKS)),
    "sinks in a window": Case(((25, 1), (0, 20)), params=LayerParams(0.7, 3.0, 5, sinks=SINKS)),
}


def _placed(case: Case, device: torch.device) -> Case:
    sinks = case.params.sinks
    if sinks is None:
        return case
    return replace(case, params=replace(case.params, sinks=sinks.to(device)))


class Scene:
    """Random tokens of a case, their blocks shuffled, the computed part already in the cache."""

    def __init__(
        self,
        case: Case,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device = CPU,
        blocks: int = BLOCKS,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.case, self.backend = _placed(case, device), backend
        self.generator = torch.Generator().manual_seed(5)
        self.spec = KVSpec(case.kv_heads, case.dim, case.block_size, dtype, device, cache_dtype)
        self.cache: LayerCache = backend.allocate(blocks, self.spec)
        lengths = [start + new for start, new in case.runs]
        self.keys = [self.random(length, case.kv_heads) for length in lengths]
        self.values = [self.random(length, case.kv_heads) for length in lengths]
        free = torch.randperm(blocks, generator=self.generator).tolist()
        counts = [-(-length // case.block_size) for length in lengths]
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        self.write([0] * len(lengths), [start for start, _ in case.runs])

    def random(self, *shape: int) -> torch.Tensor:
        made = torch.randn(*shape, self.case.dim, generator=self.generator)
        return made.to(self.spec.device, self.spec.dtype)

    def write(self, starts: list[int], ends: list[int]) -> None:
        """Runs a step and ignores its output, which would take Triton's interpreter long to
        compute."""
        some = [index for index, end in enumerate(ends) if end > starts[index]]
        if some:
            attends = self.backend.name != "triton"
            self.forward(some, [starts[i] for i in some], [ends[i] for i in some], attends)

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the backend's output for the new tokens and the exact one, both on the CPU."""
        starts = [start for start, _ in self.case.runs]
        ends = [start + new for start, new in self.case.runs]
        everything = list(range(len(ends)))
        output, queries = self.forward(everything, starts, ends)
        exact = [
            dense(query, self.keys[i], self.values[i], self.case.params)
            for i, query in zip(everything, queries, strict=True)
        ]
        return output.cpu(), torch.cat(exact)

    def forward(
        self, which: list[int], starts: list[int], ends: list[int], attends: bool = True
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Without `attends` the step has tokens to write, but no sequence that reads them."""
        metadata = self.metadata(which, starts, ends)
        if not attends:
            metadata = replace(
                metadata,
                query_start=metadata.query_start[:1],
                seq_lens=metadata.seq_lens[:0],
                block_tables=metadata.block_tables[:0],
                num_decodes=0,
            )
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        queries = [self.random(length, self.case.heads) for length in lengths]
        spans = list(zip(which, starts, ends, strict=True))
        output = self.backend.forward(
            torch.cat(queries),
            torch.cat([self.keys[i][start:end] for i, start, end in spans]),
            torch.cat([self.values[i][start:end] for i, start, end in spans]),
            self.cache,
            metadata,
            self.case.params,
        )
        return output, queries

    def metadata(self, which: list[int], starts: list[int], ends: list[int]) -> AttentionMetadata:
        size, device = self.case.block_size, self.spec.device
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        decodes = next((i for i, length in enumerate(lengths) if length != 1), len(lengths))
        tables = torch.zeros(len(which), max(-(-end // size) for end in ends), dtype=torch.int32)
        slots: list[int] = []
        for row, (index, start, end) in enumerate(zip(which, starts, ends, strict=True)):
            used = self.tables[index][: -(-end // size)]
            tables[row, : len(used)] = torch.tensor(used)
            slots += [used[at // size] * size + at % size for at in range(start, end)]
        return AttentionMetadata(
            query_start=torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32),
            seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            slots=torch.tensor(slots, device=device),
            num_decodes=decodes,
            max_query_len=max(lengths),
            max_seq_len=max(ends),
        )
