"""Attention to latents (MLA) of each backend, against one dense computation, and which backends
lack it.
"""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from headrace_engine import attention
from headrace_engine.attention.cpu import CpuBackend
from headrace_engine.attention.flash import FlashBackend
from headrace_engine.attention.reference import ReferenceBackend
from headrace_engine.attention.triton import TritonBackend
from headrace_engine.core.attention_backend import (
    AttentionMetadata,
    KVSpec,
    LatentBackend,
    LayerCache,
    LayerParams,
)
from headrace_engine.core.errors import ConfigError
from headrace_engine.layers.fp8_cache import E4M3
from headrace_testing.attention_scenes import BLOCKS, CPU, Case, Scene

Backend = ReferenceBackend | CpuBackend | TritonBackend
# The interpreter's own conversion to e4m3, which newer devices would use, does not round.
AMPERE = (8, 0)
RANK, ROTARY = 48, 8
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MIXED = Case(((21, 1), (3, 1), (18, 5), (0, 19)), 6, 1, RANK + ROTARY, 4, LayerParams(0.1))
CASES = {
    "mixed": MIXED,
    "decode": replace(MIXED, runs=((0, 1), (9, 1), (30, 1))),
    "one long": replace(MIXED, runs=((158, 1),), block_size=16),
    "many heads": replace(MIXED, heads=70, runs=((5, 1), (2, 3))),
    "odd blocks": replace(MIXED, block_size=5),
}


class OfLatents:
    """A backend for scenes in which the values are the first elements of the keys."""

    name: ClassVar[str] = "latents"

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def allocate(self, num_blocks: int, spec: KVSpec) -> LayerCache:
        return self._backend.allocate(num_blocks, replace(spec, latent=RANK))

    def block_bytes(self, spec: KVSpec) -> int:
        return self._backend.block_bytes(replace(spec, latent=RANK))

    def copy_blocks(self, cache: LayerCache, copies: torch.Tensor) -> None:
        self._backend.copy_blocks(cache, copies)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: LayerParams,
    ) -> torch.Tensor:
        return self._backend.forward_latent(query, key[:, 0], cache, metadata, params, RANK)


class LatentScene(Scene):
    """A scene whose values are the first elements of its keys."""

    def __init__(
        self,
        case: Case,
        backend: Backend,
        dtype: torch.dtype,
        device: torch.device = CPU,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(case, OfLatents(backend), dtype, device, cache_dtype=cache_dtype)
        self.values = [keys[..., :RANK] for keys in self.keys]


def backends() -> dict[str, tuple[Backend, torch.device]]:
    return {
        "reference": (ReferenceBackend(), CPU),
        "cpu": (CpuBackend(), CPU),
        "triton": (TritonBackend(AMPERE), DEVICE),
    }


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_dense_attention(name: str, backend: str) -> None:
    made, device = backends()[backend]
    output, exact = LatentScene(CASES[name], made, torch.float32, device).step()
    torch.testing.assert_close(output.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", backends())
def test_bfloat16_and_caches_in_8_bits_round_once(backend: str) -> None:
    made, device = backends()[backend]
    for cache_dtype, scale, bound in ((None, 1.0, 0.02), (E4M3, 0.5, 0.15)):
        case = replace(MIXED, params=LayerParams(0.1, key_scale=scale))
        scene = LatentScene(case, made, torch.bfloat16, device, cache_dtype)
        assert scene.cache[0].dtype is (cache_dtype or torch.bfloat16)
        output, exact = scene.step()
        torch.testing.assert_close(output.double(), exact, rtol=bound, atol=bound)


@pytest.mark.parametrize("backend", backends())
def test_a_block_contains_only_latents(backend: str) -> None:
    made, device = backends()[backend]
    spec = KVSpec(1, RANK + ROTARY, 4, torch.bfloat16, device, latent=RANK)
    cache = made.allocate(BLOCKS, spec)
    size = sum(part.numel() * part.element_size() for part in cache)
    assert size == BLOCKS * made.block_bytes(spec) == BLOCKS * 4 * (RANK + ROTARY) * 2


def test_padding_is_not_written_and_attends_to_nothing() -> None:
    backend, spec = TritonBackend(AMPERE), KVSpec(1, RANK + ROTARY, 4, torch.float32, DEVICE)
    cache = backend.allocate(2, replace(spec, latent=RANK))
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([1, 0], dtype=torch.int32, device=DEVICE),
        block_tables=torch.ones(2, 1, dtype=torch.int32, device=DEVICE),
        slots=torch.tensor([4, -1], device=DEVICE),
        num_decodes=2,
        max_query_len=1,
        max_seq_len=1,
    )
    query = torch.randn(2, 3, RANK + ROTARY, device=DEVICE)
    latents = torch.randn(2, RANK + ROTARY, device=DEVICE)
    found = backend.forward_latent(query, latents, cache, metadata, LayerParams(0.1), RANK)
    torch.testing.assert_close(found[0], latents[0, :RANK].expand(3, -1))
    assert found[1].eq(0).all()
    assert cache[0][0].eq(0).all() and cache[0].count_nonzero() == RANK + ROTARY


def test_backends_without_latents_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not issubclass(FlashBackend, LatentBackend)
    monkeypatch.setattr(attention, "_make", lambda *_: FlashBackend.__new__(FlashBackend))
    with pytest.raises(ConfigError, match=r"flash does not attend to latents \(MLA\): use"):
        attention.select("flash", torch.device("cuda"), torch.bfloat16, latents=True)
