"""Attention to those latents that an indexer chooses (DeepSeek Sparse Attention), on every device.

A sequence with no more keys than a position may attend to is computed by the backend, like any
other attention to latents. Longer ones are computed here in plain torch, one sequence after the
other: scores of all keys, and then attention to the chosen ones alone.
"""

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


def attend_to_chosen(
    backend: LatentBackend,
    query: torch.Tensor,
    latents: torch.Tensor,
    rows: IndexRows,
    cache: LayerCache,
    metadata: AttentionMetadata,
    params: LayerParams,
    rank: int,
) -> torch.Tensor:
    """Like LatentBackend.forward_latent; the last tensor of `cache` holds the indexer's keys."""
    assert params.softcap is None and params.sinks is None and params.span is None
    *stored, index_keys = cache
    store(rows.keys, index_keys, metadata.slots, 1.0)
    if metadata.max_seq_len <= rows.kept:
        return backend.forward_latent(query, latents, tuple(stored), metadata, params, rank)
    part, scale = stored[0].view(*stored[0].shape[:2], -1), params.key_scale
    store(latents, part, metadata.slots, scale)
    output = query.new_empty(*query.shape[:2], rank)
    starts = metadata.query_start.tolist()
    for index, length in enumerate(metadata.seq_lens.tolist()):
        blocks, end = metadata.block_tables[index], starts[index + 1]
        scored = gather(index_keys, blocks, length).float()
        keys = dequantize_kv(gather(part, blocks, length), scale)
        kept, (_, heads, width) = min(rows.kept, length), query.shape
        elements = max(length * rows.queries.shape[1], kept * max(width, heads))
        step = max(1, MAX_ELEMENTS // elements)
        for begin in range(starts[index], end, step):
            some = slice(begin, min(begin + step, end))
            positions = torch.arange(some.start, some.stop, device=query.device) + length - end
            chosen, seen = _choose(rows.queries[some], rows.weights[some], scored, positions, kept)
            output[some] = _attend(query[some], keys[chosen], seen, params.scale, rank)
    return output


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
