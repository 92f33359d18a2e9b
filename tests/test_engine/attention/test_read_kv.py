"""Backends return the keys and values that they have stored, whatever the layout of their cache."""

import pytest
import torch

from headrace_engine.attention.cpu import CpuBackend
from headrace_engine.attention.reference import ReferenceBackend
from headrace_engine.core.attention_backend import (
    AttentionBackend,
    AttentionMetadata,
    KVSpec,
    LayerParams,
    ReadsKV,
)

LENGTH, HEADS, DIM = 37, 2, 32
BACKENDS: dict[str, type[AttentionBackend]] = {"reference": ReferenceBackend, "cpu": CpuBackend}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [4, 16, 24])
@pytest.mark.parametrize("name", BACKENDS)
def test_keys_and_values_are_those_that_were_stored(
    name: str, block_size: int, dtype: torch.dtype
) -> None:
    backend, generator = BACKENDS[name](), torch.Generator().manual_seed(1)
    blocks = torch.randperm(-(-LENGTH // block_size), generator=generator).int() + 1
    spec = KVSpec(HEADS, DIM, block_size, dtype, torch.device("cpu"))
    cache = backend.allocate(len(blocks) + 1, spec)
    key, value = torch.randn(2, LENGTH, HEADS, DIM, generator=generator).to(dtype)
    places = torch.arange(LENGTH)
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, LENGTH], dtype=torch.int32),
        seq_lens=torch.tensor([LENGTH], dtype=torch.int32),
        block_tables=blocks[None].contiguous(),
        slots=blocks[places // block_size].long() * block_size + places % block_size,
        num_decodes=0,
        max_query_len=LENGTH,
        max_seq_len=LENGTH,
    )
    backend.forward(key, key, value, cache, metadata, LayerParams(scale=1.0))
    assert isinstance(backend, ReadsKV)
    for begin, end in ((0, LENGTH), (3, 18), (25, 37), (16, 17)):
        found = backend.read_kv(cache, blocks, begin, end, dtype)
        for part, stored in zip(found, (key, value), strict=True):
            assert torch.equal(part, stored[begin:end]), (begin, end)
