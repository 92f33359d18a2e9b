"""Attention to those latents that an indexer chooses (DeepSeek Sparse Attention), on every device.

A sequence with no more keys than a position may attend to is computed by the backend, like any
other attention to latents. Longer ones are computed here in plain torch, one sequence after the
other: scores of all keys, and then attention to the chosen ones alone. Several layers may share
what one indexer chooses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..core.attention_backend import AttentionMetadata, LatentBackend, LayerCache, LayerParams
from ..layers.fp8_cache import dequantize_kv
from .reference import gather, store

# Elements of the largest temporary tensor: they bound how many rows are computed at once.
MAX_ELEMENTS = 2**25


@dataclass(frozen=True, slots=True)
class IndexRows:
    """What an indexer computes of T tokens: queries [T, heads, width], the weights of their heads
    in float32 [T, heads], and keys [T, width]. Each position attends to `kept` keys."""

    queries: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor
    kept: int


@dataclass(frozen=True, slots=True)
class ChosenKeys:
    """The keys of the rows [begin, end) of a step, all of one sequence: `keys` int64 [n, kept], and
    whether a row sees them [n, kept]."""

    sequence: int
    begin: int
    end: int
    keys: torch.Tensor
    seen: torch.Tensor


# The chosen keys of all rows of a step; None: each position attends to all keys that it sees.
Choice = Sequence[ChosenKeys] | None


def choose_keys(rows: IndexRows, index_keys: torch.Tensor, metadata: AttentionMetadata) -> Choice:
    """Stores an indexer's keys in its cache [blocks, block_size, width], and chooses keys."""
    store(rows.keys, index_keys, metadata.slots, 1.0)
    if metadata.max_seq_len <= rows.kept:
        return None
    return list(_chosen(rows, index_keys, metadata))


def _chosen(
    rows: IndexRows, index_keys: torch.Tensor, metadata: AttentionMetadata
) -> Iterator[ChosenKeys]:
    starts, heads = metadata.query_start.tolist(), rows.queries.shape[1]
    for index, length in enumerate(metadata.seq_lens.tolist()):
        scored = gather(index_keys, metadata.block_tables[index], length).float()
        for begin, end in _pieces(starts[index], starts[index + 1], length * heads):
            positions = torch.arange(begin, end, device=scored.device) + length - starts[index + 1]
            some, kept = slice(begin, end), min(rows.kept, length)
            keys, seen = _choose(rows.queries[some], rows.weights[some], scored, positions, kept)
            yield ChosenKeys(index, begin, end, keys, seen)


def attend_to_chosen(
    backend: LatentBackend,
    query: torch.Tensor,
    latents: torch.Tensor,
    choice: Choice,
    cache: LayerCache,
    metadata: AttentionMetadata,
    params: LayerParams,
    rank: int,
) -> torch.Tensor:
    """Like LatentBackend.forward_latent, for the chosen keys alone."""
    assert params.softcap is None and params.sinks is None and params.span is None
    if choice is None:
        return backend.forward_latent(query, latents, cache, metadata, params, rank)
    part, scale = cache[0].view(*cache[0].shape[:2], -1), params.key_scale
    store(latents, part, metadata.slots, scale)
    output = query.new_empty(*query.shape[:2], rank)
    lengths, gathered, keys = metadata.seq_lens.tolist(), -1, latents
    for chosen in choice:
        if chosen.sequence != gathered:
            gathered = chosen.sequence
            blocks = metadata.block_tables[gathered]
            keys = dequantize_kv(gather(part, blocks, lengths[gathered]), scale)
        _, heads, width = query.shape
        elements = chosen.keys.shape[1] * max(width, heads)
        for begin, end in _pieces(chosen.begin, chosen.end, elements):
            own = slice(begin - chosen.begin, end - chosen.begin)
            output[begin:end] = _attend(
                query[begin:end], keys[chosen.keys[own]], chosen.seen[own], params.scale, rank
            )
    return output


def _pieces(begin: int, end: int, elements: int) -> Iterator[tuple[int, int]]:
    """Divides rows, each of which needs `elements` elements of temporary memory."""
    step = max(1, MAX_ELEMENTS // elements)
    for first in range(begin, end, step):
        yield first, min(first + step, end)


def _choose(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    kept: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best keys of each position, int64 [n, kept], and whether the position sees them."""
    scores = torch.einsum("nhd,ld->nhl", queries.float(), keys).relu_()
    totals = torch.bmm(weights[:, None], scores)[:, 0]
    later = torch.arange(len(keys), device=keys.device) > positions[:, None]
    chosen = totals.masked_fill_(later, -torch.inf).topk(kept, dim=-1, sorted=False).indices
    return chosen, chosen <= positions[:, None]


def _attend(
    query: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, scale: float, rank: int
) -> torch.Tensor:
    """Attention of query [n, heads, D] to keys [n, kept, D] of their own: [n, heads, rank]."""
    scores = torch.bmm(query.float(), keys.transpose(1, 2)) * scale
    weights = torch.softmax(scores.masked_fill_(~seen[:, None], -torch.inf), dim=-1)
    return torch.bmm(weights, keys[..., :rank]).to(query.dtype)
