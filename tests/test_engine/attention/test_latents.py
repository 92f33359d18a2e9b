"""Attention to latents (MLA) of each backend, against one dense computation, and which backends
lack it; native kernels beside the reference backend, with the best and the oldest instructions.
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
from headrace_engine.kernels.cpu import library
from headrace_engine.layers.fp8_cache import E4M3, E5M2
from headrace_testing.attention_scenes import BLOCKS, CPU, SINKS, Case, Scene
from headrace_testing.cpu_levels import chosen_sets

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


# Prompts around a chunk of keys (64), a block of rows (96) and a split of keys (512).
PROMPTS = Case(((0, 600), (0, 70), (0, 1)), 4, 1, RANK + ROTARY, 32, LayerParams(0.1))
NATIVE = {
    "plain": PROMPTS,
    "blocks of seven": replace(PROMPTS, runs=((0, 200), (0, 33)), block_size=7),
    "sinks and a softcap in a window": replace(
        PROMPTS, params=LayerParams(0.2, 3.0, 70, sinks=SINKS)
    ),
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


# `make test-cpus` runs those between the best and the oldest.
@pytest.fixture(params=dict.fromkeys((chosen_sets()[0], chosen_sets()[-1])))
def native(request: pytest.FixtureRequest) -> CpuBackend:
    return CpuBackend(library.load(request.param))


def in_chunks(
    case: Case,
    backend: Backend,
    chunk: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """The outputs of each sequence, `chunk` tokens of each sequence in a step."""
    scene = LatentScene(case, backend, dtype, cache_dtype=cache_dtype)
    lengths = [new for _, new in case.runs]
    queries = [scene.random(length, case.heads) for length in lengths]
    outputs: list[list[torch.Tensor]] = [[] for _ in lengths]
    for begin in range(0, max(lengths), chunk):
        which = [index for index, length in enumerate(lengths) if length > begin]
        ends = [min(begin + chunk, lengths[index]) for index in which]
        spans = list(zip(which, ends, strict=True))
        found = backend.forward_latent(
            torch.cat([queries[index][begin:end] for index, end in spans]),
            torch.cat([scene.keys[index][begin:end, 0] for index, end in spans]),
            scene.cache,
            scene.metadata(which, [begin] * len(which), ends),
            scene.case.params,
            RANK,
        )
        parts = torch.split(found, [end - begin for end in ends])
        for index, part in zip(which, parts, strict=True):
            outputs[index].append(part)
    return [torch.cat(parts) for parts in outputs]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", NATIVE)
def test_native_kernels_agree_with_the_reference_and_chunks_give_the_same_bits(
    native: CpuBackend, name: str, dtype: torch.dtype
) -> None:
    whole = in_chunks(NATIVE[name], native, 600, dtype)
    expected = in_chunks(NATIVE[name], ReferenceBackend(), 600, dtype)
    for found, wanted in zip(whole, expected, strict=True):
        bound = TOLERANCE[dtype]
        torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)
    for chunk in (17, 64):
        for part, found in zip(in_chunks(NATIVE[name], native, chunk, dtype), whole, strict=True):
            assert torch.equal(part, found)


@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2])
def test_native_kernels_read_the_same_8_bits_as_the_reference(
    native: CpuBackend, cache_dtype: torch.dtype
) -> None:
    case = replace(NATIVE["blocks of seven"], params=LayerParams(0.1, key_scale=0.5))
    found = in_chunks(case, native, 64, torch.float32, cache_dtype)
    wanted = in_chunks(case, ReferenceBackend(), 64, torch.float32, cache_dtype)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


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
