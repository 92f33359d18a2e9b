"""Paged attention of the native kernels against the reference backend, for every instruction set
that this CPU runs: head sizes, groups, block sizes, lengths around tiles, chunks and key splits,
windows, softcap, strided rows, stale cache contents, threads. Also the fall-back, which a
Kubernetes node without a compiler gets.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch.nn import functional as F

from headrace_engine.attention.cpu import CpuBackend
from headrace_engine.attention.reference import ReferenceBackend
from headrace_engine.core.attention_backend import (
    AttentionMetadata,
    KVSpec,
    LayerCache,
    LayerParams,
)
from headrace_engine.kernels.cpu import library
from headrace_engine.layers.fp8_cache import E4M3, E5M2, dequantize_kv, quantize_kv
from headrace_testing.attention_scenes import SINKS
from headrace_testing.cpu_levels import chosen_sets

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
Runs = tuple[tuple[int, int], ...]

# (new tokens, all keys): around a tile (16), a chunk (64), a row block (48), a split (512)
DECODES: Runs = ((1, 1), (1, 16), (1, 17), (1, 64), (1, 65), (1, 511), (1, 513), (1, 1100))
MIXED: Runs = ((1, 37), (1, 600), (5, 5), (70, 70), (33, 90), (2, 640), (24, 24), (49, 130))


@pytest.fixture(params=chosen_sets())
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    return CpuBackend(library.load(request.param))


@dataclass(frozen=True)
class Case:
    runs: Runs = MIXED
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    block_size: int = 16
    params: LayerParams = LayerParams(0.18)


class Scene:
    """A batch with shuffled blocks, and what its sequences computed in earlier steps."""

    def __init__(
        self, case: Case, dtype: torch.dtype, cache_dtype: torch.dtype | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        size, dim = case.block_size, case.dim
        counts = [-(-length // size) for _, length in case.runs]
        self.case = case
        self.num_blocks = sum(counts) + 3
        self.spec = KVSpec(case.kv_heads, dim, size, dtype, CPU, cache_dtype)
        ids = torch.randperm(self.num_blocks, generator=generator).int()
        self.tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, (begin, end) in enumerate(
            itertools.pairwise(itertools.accumulate(counts, initial=0))
        ):
            self.tables[row, : end - begin] = ids[begin:end]
        past = [self._slots(row, 0, length - new) for row, (new, length) in enumerate(case.runs)]
        new = [
            self._slots(row, length - new, length) for row, (new, length) in enumerate(case.runs)
        ]
        self.past, self.new = torch.cat(past), torch.cat(new)
        shape = (len(self.past), case.kv_heads, dim)
        self.past_key = torch.randn(shape, generator=generator).to(dtype)
        self.past_value = torch.randn(shape, generator=generator).to(dtype)
        width = (case.heads + 2 * case.kv_heads) * dim
        fused = torch.randn(len(self.new), width, generator=generator).to(dtype)
        rows = fused.view(len(self.new), -1, dim)
        values = case.heads + case.kv_heads
        self.query, self.key = rows[:, : case.heads], rows[:, case.heads : values]
        self.value = rows[:, values:]

    def _slots(self, row: int, begin: int, end: int) -> torch.Tensor:
        positions = torch.arange(begin, end)
        size = self.case.block_size
        return self.tables[row, positions // size].long() * size + positions % size

    def metadata(self) -> AttentionMetadata:
        runs = self.case.runs
        starts = list(itertools.accumulate((new for new, _ in runs), initial=0))
        return AttentionMetadata(
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([length for _, length in runs], dtype=torch.int32),
            block_tables=self.tables,
            slots=self.new,
            num_decodes=next((i for i, run in enumerate(runs) if run[0] > 1), len(runs)),
            max_query_len=max(new for new, _ in runs),
            max_seq_len=max(length for _, length in runs),
        )

    def fill(self, backend: CpuBackend | ReferenceBackend, cache: LayerCache) -> None:
        """Writes earlier keys and values, as tokens that belong to no sequence of the step."""
        nobody = AttentionMetadata(
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(0, dtype=torch.int32),
            torch.zeros((0, 1), dtype=torch.int32),
            self.past,
            num_decodes=0,
            max_query_len=0,
            max_seq_len=0,
        )
        query = self.past_key.new_zeros(len(self.past), self.case.heads, self.case.dim)
        params = self.case.params
        backend.forward(query, self.past_key, self.past_value, cache, nobody, params)

    def run(self, backend: CpuBackend | ReferenceBackend, cache: LayerCache) -> torch.Tensor:
        self.fill(backend, cache)
        return self.step(backend, cache)

    def step(self, backend: CpuBackend | ReferenceBackend, cache: LayerCache) -> torch.Tensor:
        return backend.forward(
            self.query, self.key, self.value, cache, self.metadata(), self.case.params
        )


@cache
def referred(
    case: Case, dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> tuple[Scene, torch.Tensor]:
    """A scene and the result of the reference backend, which is slow, for all instruction sets."""
    scene, reference = Scene(case, dtype, cache_dtype), ReferenceBackend()
    return scene, scene.run(reference, reference.allocate(scene.num_blocks, scene.spec))


def check(
    backend: CpuBackend, case: Case, dtype: torch.dtype, cache_dtype: torch.dtype | None = None
) -> None:
    scene, expected = referred(case, dtype, cache_dtype)
    found = scene.run(backend, backend.allocate(scene.num_blocks, scene.spec))
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def cases() -> Iterator[tuple[str, Case]]:
    yield "decodes", Case(DECODES)
    for dim in (16, 48, 64, 80, 128, 256):
        yield f"head size {dim}", Case(dim=dim)
    for heads, kv_heads in ((1, 1), (7, 1), (14, 2), (3, 3), (50, 1)):
        yield f"{heads} heads on {kv_heads}", Case(heads=heads, kv_heads=kv_heads)
    for size in (1, 7, 8, 32, 48):
        yield f"blocks of {size}", Case(block_size=size)
    for window in (1, 5, 16, 100, 5000):
        yield f"window {window}", Case(params=LayerParams(0.2, None, window))
    yield "softcap", Case(params=LayerParams(0.7, 3.0))
    yield "softcap, window", Case(params=LayerParams(0.7, 3.0, 20))
    yield "large scores", Case(params=LayerParams(6.0))
    yield "sinks", Case(params=LayerParams(0.2, sinks=SINKS))
    yield "sinks of split decodes", Case(DECODES, params=LayerParams(0.7, 3.0, sinks=SINKS))
    yield "sinks, window", Case(params=LayerParams(0.2, None, 20, sinks=SINKS), block_size=5)
    yield "one token", Case(((1, 1),))
    yield "no past", Case(((3, 3), (64, 64), (65, 65)))
    yield "one long", Case(((1, 3000),))


CASES = dict(cases())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_kernels_agree_with_the_reference(
    backend: CpuBackend, case: Case, dtype: torch.dtype
) -> None:
    check(backend, case, dtype)


@pytest.mark.parametrize("case", [Case(dim=24), Case(dim=272, runs=((1, 9),))])
def test_head_sizes_without_a_kernel_use_the_reference(backend: CpuBackend, case: Case) -> None:
    check(backend, case, torch.float32)


def test_float16_uses_the_reference(backend: CpuBackend) -> None:
    check(backend, Case(), torch.float16)


def test_without_a_library_everything_uses_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable() -> library.Kernels:
        raise library.KernelsUnavailable("no compiler")

    monkeypatch.setattr(library, "load", unavailable)
    backend = CpuBackend()
    spec = Scene(Case(), torch.float32).spec
    assert backend.block_bytes(spec) == ReferenceBackend().block_bytes(spec)
    check(backend, Case(), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [16, 7])
def test_stale_nan_in_unused_slots_reaches_no_output(
    backend: CpuBackend, dtype: torch.dtype, block_size: int
) -> None:
    scene = Scene(Case(((1, 37), (5, 70), (1, 1)), block_size=block_size), dtype)
    cache = backend.allocate(scene.num_blocks, scene.spec)
    cache[0].fill_(torch.nan)
    assert scene.run(backend, cache).isfinite().all()


def test_nan_in_a_sequence_reaches_only_its_own_output(backend: CpuBackend) -> None:
    scene = Scene(Case(((1, 37), (1, 40), (2, 600))), torch.float32)
    scene.query[1] = torch.nan
    output = scene.run(backend, backend.allocate(scene.num_blocks, scene.spec))
    assert output[1].isnan().all()
    assert output[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("block_size", [16, 32, 8])
def test_copied_blocks_serve_like_their_sources(backend: CpuBackend, block_size: int) -> None:
    scene = Scene(Case(((1, 70),), block_size=block_size), torch.bfloat16)
    cache = backend.allocate(2 * scene.num_blocks, scene.spec)
    expected = scene.run(backend, cache)
    sources = scene.tables[0].long()
    copies = torch.stack((sources, sources + scene.num_blocks), dim=1)
    backend.copy_blocks(cache, copies)
    for part in cache:
        part[sources] = 0
    scene.tables = scene.tables + scene.num_blocks
    scene.new = scene.new + scene.num_blocks * block_size
    assert torch.equal(scene.step(backend, cache), expected)


def test_a_sequences_output_does_not_depend_on_its_neighbours(backend: CpuBackend) -> None:
    scene = Scene(Case(DECODES, block_size=16), torch.bfloat16)
    cache = backend.allocate(scene.num_blocks, scene.spec)
    together = scene.run(backend, cache)
    for row, run in enumerate(DECODES):
        one = Scene(Case((run,)), torch.bfloat16)
        one.tables, one.new = scene.tables[row : row + 1], scene.new[row : row + 1]
        parts = (part[row : row + 1] for part in (scene.query, scene.key, scene.value))
        one.query, one.key, one.value = parts
        assert torch.equal(one.step(backend, cache)[0], together[row])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same(backend: CpuBackend, threads: int) -> None:
    scene = Scene(Case(), torch.bfloat16)
    expected = scene.run(backend, backend.allocate(scene.num_blocks, scene.spec))
    torch.set_num_threads(threads)
    found = scene.run(backend, backend.allocate(scene.num_blocks, scene.spec))
    assert torch.equal(found, expected)


def test_each_step_uses_its_own_metadata(backend: CpuBackend) -> None:
    """The backend keeps data derived from a step's metadata for the other layers of that step
    only."""
    scene, shorter = (Scene(Case(((1, length),)), torch.float32) for length in (20, 1))
    cache = backend.allocate(scene.num_blocks, scene.spec)
    first = scene.run(backend, cache)
    alone = shorter.step(backend, cache)
    torch.testing.assert_close(alone, shorter.value.repeat_interleave(2, 1))
    assert torch.equal(scene.step(backend, cache), first)


@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2])
def test_caches_of_8_bit_floats(backend: CpuBackend, cache_dtype: torch.dtype) -> None:
    """The reference reads the very same numbers; in bfloat16 they are rounded after their scale."""
    params = LayerParams(0.18, key_scale=0.3125, value_scale=1.75)
    for dtype, block_size in itertools.product((torch.float32, torch.bfloat16), (16, 5)):
        case = Case(params=params, block_size=block_size)
        check(backend, case, dtype, cache_dtype)
    window = replace(params, sliding_window=20, softcap=3.0)
    check(backend, Case(params=window, dim=64), torch.float32, cache_dtype)


@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2])
def test_every_8_bit_float_and_the_values_between_them(
    backend: CpuBackend, cache_dtype: torch.dtype
) -> None:
    """The attention of a token to itself alone is its value.

    The values are all codes, the halves and quarters between them, numbers that are too large, and
    NaN, which must be rounded as torch does.
    """
    codes = torch.arange(256, dtype=torch.uint8).view(cache_dtype).float()
    finite = codes[codes.isfinite()].sort().values
    steps = [finite + (finite.roll(-1) - finite) * part for part in (0.0, 0.25, 0.5, 0.75)]
    numbers = torch.cat([*steps, torch.tensor([1e6, -1e6, torch.nan, 1e-9])])
    rows = F.pad(numbers, (0, -len(numbers) % 64)).view(-1, 1, 64)
    case = Case(runs=((1, 1),) * len(rows), heads=1, kv_heads=1, dim=64)
    scene = Scene(case, torch.float32, cache_dtype)
    scene.query, scene.key, scene.value = torch.zeros_like(rows), torch.zeros_like(rows), rows
    found = scene.step(backend, backend.allocate(scene.num_blocks, scene.spec))
    expected = dequantize_kv(quantize_kv(rows, cache_dtype, 1.0), 1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_8_bit_floats_take_half_of_bfloat16(backend: CpuBackend) -> None:
    scene = Scene(Case(), torch.bfloat16, E4M3)
    taken = sum(part.nbytes for part in backend.allocate(10, scene.spec))
    whole = replace(scene.spec, cache_dtype=None)
    assert taken == 10 * backend.block_bytes(scene.spec) == 5 * backend.block_bytes(whole)
