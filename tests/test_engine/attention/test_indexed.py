"""Attention to the latents that an indexer chooses, of each backend: few keys are all seen, and of
more keys exactly the chosen ones.
"""

import pytest
import torch

from headrace_engine.attention.cpu import CpuBackend
from headrace_engine.attention.indexed import IndexRows, attend_to_chosen, choose_keys
from headrace_engine.attention.reference import ReferenceBackend
from headrace_engine.attention.triton import TritonBackend
from headrace_engine.core.attention_backend import AttentionMetadata, KVSpec, LayerParams

RANK, WIDTH, HEADS, INDEXED = 16, 24, 3, 8
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PARAMS = LayerParams(0.3)


@pytest.mark.parametrize("kept", [4, 30])
@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_each_position_attends_to_the_keys_with_the_best_scores(name: str, kept: int) -> None:
    device = DEVICE if name == "triton" else torch.device("cpu")
    backend: ReferenceBackend | CpuBackend | TritonBackend = ReferenceBackend()
    if name != "reference":
        backend = CpuBackend() if name == "cpu" else TritonBackend((8, 0))
    spec = KVSpec(1, WIDTH, 4, torch.float32, device, latent=RANK, indexed=INDEXED)
    cache = backend.allocate(12, spec)
    size = sum(part.numel() * part.element_size() for part in cache)
    assert size == 12 * backend.block_bytes(spec) == 12 * 4 * (WIDTH + INDEXED) * 4
    lengths = (19, 5)
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    total = sum(lengths)
    query, latents = drawn(total, HEADS, WIDTH), drawn(total, WIDTH)
    rows = IndexRows(drawn(total, 6, INDEXED), drawn(total, 6), drawn(total, INDEXED), kept)
    tables = torch.tensor([[3, 1, 7, 0, 9], [5, 2, 0, 0, 0]], dtype=torch.int32, device=device)
    slots = [
        int(tables[which, at // 4]) * 4 + at % 4
        for which, length in enumerate(lengths)
        for at in range(length)
    ]
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, 19, 24], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=tables,
        slots=torch.tensor(slots, device=device),
        num_decodes=0,
        max_query_len=19,
        max_seq_len=19,
    )
    *stored, index_keys = cache
    choice, where = choose_keys(rows, index_keys, metadata), (tuple(stored), metadata, PARAMS, RANK)
    found = attend_to_chosen(backend, query, latents, choice, *where)
    for first, length in ((0, 19), (19, 5)):
        for at in range(length):
            own, seen = first + at, slice(first, first + at + 1)
            products = (rows.keys[seen] @ rows.queries[own].T).relu()
            chosen = (products @ rows.weights[own]).topk(min(kept, at + 1)).indices
            keys = latents[seen][chosen]
            shares = (query[own] @ keys.T * PARAMS.scale).softmax(-1)
            torch.testing.assert_close(found[own], shares @ keys[:, :RANK], rtol=1e-4, atol=1e-5)
