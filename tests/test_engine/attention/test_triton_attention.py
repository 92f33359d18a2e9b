"""The Triton backend through Triton's interpreter, against one dense computation: ragged mixes,
head sizes and groups, windows, soft caps, split keys, shared blocks, fp8 caches, padding.

With a CUDA device the same tests run there, compiled.
"""

import logging
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_engine import attention
from headrace_engine.attention import triton as triton_backend
from headrace_engine.attention.flash import FlashBackend
from headrace_engine.attention.reference import ReferenceBackend
from headrace_engine.attention.triton import TritonBackend
from headrace_engine.core.attention_backend import AttentionMetadata, KVSpec, LayerParams
from headrace_engine.core.errors import ConfigError
from headrace_engine.device.scratch import Scratch
from headrace_engine.kernels.triton.launch import AttentionLaunches, DecodeLaunch, Launch
from headrace_engine.layers.fp8_cache import E4M3, E5M2
from headrace_testing.attention_scenes import BLOCKS, CASES, CPU, SINKS, Case, Scene

AMPERE, HOPPER = (8, 0), (9, 0)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

WIDE = Case(((21, 1), (3, 1), (18, 5), (0, 19)))
MIXES = {
    "head of 64, one group of 8": replace(WIDE, heads=8, kv_heads=1, dim=64),
    "head of 80, groups of 4": replace(WIDE, heads=8, kv_heads=2, dim=80),
    "head of 96, groups of 1": replace(WIDE, heads=2, kv_heads=2, dim=96),
    "head of 192, groups of 7": replace(WIDE, heads=7, kv_heads=1, dim=192, block_size=16),
    "head of 256 in a window": replace(WIDE, dim=256, params=LayerParams(0.1, None, 7)),
    "head of 4": replace(WIDE, dim=4),
    "three KV heads": replace(WIDE, heads=6, kv_heads=3, block_size=3),
    "one row more than a tile": replace(WIDE, runs=((0, 129), (2, 1)), block_size=16),
}


class RoundScene(Scene):
    """Keys, values and queries in which 8-bit floats represent any power of two."""

    def random(self, *shape: int) -> torch.Tensor:
        return super().random(*shape).clamp(-2, 2).mul(2).round().div(2)


class UnequalScene(RoundScene):
    """Queries of 2^18, 1, 2^-40 and 0 times such numbers, one factor for each head."""

    def random(self, *shape: int) -> torch.Tensor:
        made = super().random(*shape)
        if shape[1] == self.case.heads:
            factors = torch.tensor([2.0**18, 1.0, 2.0**-40, 0.0], device=made.device)
            made = (made * factors[:, None]).to(made.dtype)
        return made


def bytes_of(part: torch.Tensor) -> torch.Tensor:
    return part.view(torch.uint8)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences with more than 16 keys are split into at most 4 parts."""
    monkeypatch.setattr(triton_backend, "split_keys", lambda *_: 16)
    monkeypatch.setattr(triton_backend, "MAX_SPLITS", 4)
    monkeypatch.setattr(triton_backend, "decode_launch", lambda *_: Launch(16, 16, 4, 2))


def check(case: Case, dtype: torch.dtype = torch.float32, bound: float = 2e-5) -> None:
    found, exact = Scene(case, TritonBackend(HOPPER), dtype, DEVICE).step()
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), exact, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_the_dense_computation(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("name", MIXES)
def test_every_head_size_and_group(name: str) -> None:
    check(MIXES[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mixed", "window", "softcap"])
def test_half_precision_is_exact_up_to_its_own_rounding(name: str, dtype: torch.dtype) -> None:
    check(CASES[name], dtype, 2e-2)


@pytest.mark.parametrize("window", [None, 1, 23, 40])
def test_long_sequences_are_split_and_merged(window: int | None, small_parts: None) -> None:
    runs = ((15, 1), (16, 1), (0, 1), (100, 1), (32, 2))
    check(Case(runs, block_size=8, params=LayerParams(0.2, None, window)))


def test_split_sequences_with_a_soft_cap(small_parts: None) -> None:
    check(Case(((70, 1), (18, 1)), block_size=8, params=LayerParams(0.7, 3.0)))


@pytest.mark.parametrize("merges", [True, False])
def test_sinks_are_added_once_to_split_sequences(merges: bool, small_parts: None) -> None:
    backend = TritonBackend(HOPPER)
    backend.use(AttentionLaunches(decodes=((8, DecodeLaunch(Launch(16, 16, 4, 2), 16, merges)),)))
    params = LayerParams(0.2, None, 40, sinks=SINKS)
    case = Case(((70, 1), (18, 1), (3, 1), (30, 2)), block_size=8, params=params)
    found, exact = Scene(case, backend, torch.float32, DEVICE).step()
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(
    decodes=st.lists(st.integers(0, 40), max_size=3),
    chunks=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), max_size=3),
    group=st.sampled_from([1, 2, 3, 4]),
    window=st.none() | st.integers(1, 20),
    softcap=st.none() | st.just(2.0),
    block_size=st.sampled_from([8, 16]),
)
def test_any_mixture_equals_the_reference(
    decodes: list[int],
    chunks: list[tuple[int, int]],
    group: int,
    window: int | None,
    softcap: float | None,
    block_size: int,
) -> None:
    runs = (*((computed, 1) for computed in decodes), *chunks) or ((0, 1),)
    params = LayerParams(0.3, softcap, window)
    case = Case(runs, 2 * group, 2, 16, block_size, params)
    found, _ = Scene(case, TritonBackend(HOPPER), torch.float32, DEVICE).step()
    expected, _ = Scene(case, ReferenceBackend(), torch.float32, DEVICE).step()
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


class CountedScene(Scene):
    """Steps as they are recorded: padded, with the number of decoding sequences on the device."""

    def metadata(self, which: list[int], starts: list[int], ends: list[int]) -> AttentionMetadata:
        made, prompts = super().metadata(which, starts, ends), 4
        tokens = len(made.slots)
        count = torch.tensor([made.num_decodes], dtype=torch.int32, device=DEVICE)
        rows = tokens + prompts - len(made.seq_lens)
        return replace(
            made,
            query_start=torch.nn.functional.pad(made.query_start, (0, rows), value=tokens),
            seq_lens=torch.nn.functional.pad(made.seq_lens, (0, rows)),
            block_tables=torch.nn.functional.pad(made.block_tables, (0, 0, 0, rows)),
            num_decodes=tokens,
            decode_count=count,
        )


@pytest.mark.parametrize(
    ("name", "merges"),
    [
        *[(name, None) for name in ("mixed", "decode", "prefill", "sinks in a window")],
        *[("mixed", merges) for merges in (True, False)],
    ],
)
def test_a_recorded_step_finds_on_the_device_how_many_sequences_decode(
    name: str, merges: bool | None
) -> None:
    backend, tile = TritonBackend(HOPPER), Launch(16, 16, 4, 2)
    if merges is not None:
        backend.use(AttentionLaunches(decodes=((64, DecodeLaunch(tile, 16, merges)),)))
    found, exact = CountedScene(CASES[name], backend, torch.float32, DEVICE).step()
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)


def test_garbage_after_a_sequence_is_never_read() -> None:
    scene = Scene(CASES["mixed"], TritonBackend(HOPPER), torch.float32, DEVICE)
    used = {block for table in scene.tables for block in table}
    for part in scene.cache:
        part[[block for block in range(BLOCKS) if block not in used]] = torch.nan
    found, exact = scene.step()
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)


def test_a_sequence_reads_blocks_that_another_writes_in_the_same_step() -> None:
    scene = Scene(Case(((8, 1), (0, 8))), TritonBackend(HOPPER), torch.float32, DEVICE)
    scene.tables[0][:2] = scene.tables[1]
    for kept in (scene.keys, scene.values):
        kept[0][:8] = kept[1]
    found, exact = scene.step()
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)


def test_caches_of_more_elements_than_32_bits_count() -> None:
    """A GPU with 80 GB has such caches. Here only the touched pages take memory."""
    case = Case(((37, 1), (20, 9)), heads=2, kv_heads=1, dim=64, block_size=16)
    scene = Scene(case, TritonBackend(HOPPER), torch.float16, DEVICE)
    small, blocks = scene.cache, 2**31 // (16 * 64) + BLOCKS
    large = [torch.empty(blocks, 1, 16, 64, dtype=torch.float16, device=DEVICE) for _ in small]
    for part, own in zip(large, small, strict=True):
        part[-BLOCKS:] = own
    scene.cache = (large[0], large[1])
    scene.tables = [[block + blocks - BLOCKS for block in table] for table in scene.tables]
    found, exact = scene.step()
    torch.testing.assert_close(found.double(), exact, rtol=4e-3, atol=4e-3)


def test_copied_blocks_hold_the_same_keys() -> None:
    scene = Scene(CASES["decode"], TritonBackend(HOPPER), torch.float32, DEVICE)
    used = {block for table in scene.tables for block in table}
    spare = [block for block in range(BLOCKS) if block not in used]
    moves = list(zip(scene.tables[3][:3], spare[:3], strict=True))
    scene.backend.copy_blocks(scene.cache, torch.tensor(moves, device=DEVICE))
    scene.tables[3] = spare[:3] + scene.tables[3][3:]
    found, exact = scene.step()
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cache_dtype", [None, E4M3, E5M2])
def test_block_bytes_equal_the_allocated_bytes(cache_dtype: torch.dtype | None) -> None:
    backend = TritonBackend(HOPPER)
    spec = KVSpec(2, 32, 16, torch.bfloat16, DEVICE, cache_dtype)
    taken = sum(part.nbytes for part in backend.allocate(10, spec))
    assert (
        taken == 10 * backend.block_bytes(spec) == 10 * 2 * 2 * 32 * 16 * (1 if cache_dtype else 2)
    )


def test_a_sequences_bits_do_not_depend_on_its_neighbours(small_parts: None) -> None:
    runs = ((50, 1), (10, 1), (70, 1), (30, 9), (0, 21))
    scene = Scene(Case(runs, block_size=16), TritonBackend(HOPPER), torch.float32, DEVICE)
    together, queries = scene.forward(list(range(5)), [r[0] for r in runs], [sum(r) for r in runs])
    rows = torch.split(together, [new for _, new in runs])
    for index in (0, 3):
        start, end = runs[index][0], sum(runs[index])
        span = slice(start, end)
        alone = scene.backend.forward(
            queries[index],
            scene.keys[index][span],
            scene.values[index][span],
            scene.cache,
            scene.metadata([index], [start], [end]),
            scene.case.params,
        )
        assert torch.equal(alone, rows[index])


@pytest.mark.parametrize("name", ["mixed", "window", "softcap", "odd head"])
def test_e4m3_from_bits_equals_torchs_rounding(name: str) -> None:
    """As computed on devices before Ada.

    Both read the same numbers, so they differ only by the rounding of float32 sums; the numbers
    range from subnormals to beyond the largest.
    """
    case = replace(CASES[name], params=replace(CASES[name].params, key_scale=0.4, value_scale=2e-3))
    scene, reference = (
        Scene(case, backend, torch.float32, DEVICE, cache_dtype=E4M3)
        for backend in (TritonBackend(AMPERE), ReferenceBackend())
    )
    for row in range(len(scene.values)):
        scene.values[row][0, 0, :4] = reference.values[row][0, 0, :4] = torch.tensor(
            [1e-5, 3e-6, -1e4, 0.0]
        )
    found, _ = scene.step()
    expected, _ = reference.step()
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    for part, other in zip(scene.cache, reference.cache, strict=True):
        assert torch.equal(bytes_of(part), bytes_of(other.transpose(1, 2)))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_fp8_caches_hold_scaled_numbers(dtype: torch.dtype) -> None:
    """Uses numbers that both formats hold exactly, as the interpreter rounds others wrongly."""
    params = replace(CASES["mixed"].params, key_scale=0.5, value_scale=0.25)
    case = replace(CASES["mixed"], params=params)
    scene = RoundScene(case, TritonBackend(HOPPER), torch.float32, DEVICE, cache_dtype=dtype)
    assert all(part.dtype is dtype for part in scene.cache)
    found, exact = scene.step()
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("capability", [AMPERE, HOPPER])
def test_fp8_caches_take_bfloat16_queries_of_any_size(capability: tuple[int, int]) -> None:
    """Products of such queries are in float16, which can represent neither 2^18 nor 2^-40."""
    params = replace(CASES["mixed"].params, scale=2.0**-18, value_scale=0.5)
    case = replace(CASES["mixed"], params=params)
    backend = TritonBackend(capability)
    scene = UnequalScene(case, backend, torch.bfloat16, DEVICE, cache_dtype=E4M3)
    found, exact = scene.step()
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("capability", [AMPERE, HOPPER])
def test_fp8_caches_saturate_and_keep_nan(capability: tuple[int, int]) -> None:
    case = Case(((0, 1),), params=LayerParams(0.2, value_scale=0.5))
    backend = TritonBackend(capability)
    scene = Scene(case, backend, torch.float32, DEVICE, cache_dtype=E4M3)
    scene.values[0][:] = -1e9
    scene.values[0][0, 1] = torch.nan
    found, _ = scene.step()
    assert found[0, :2].eq(-448.0 * 0.5).all()
    assert found[0, 2:].isnan().all() or capability == HOPPER and DEVICE == CPU


@pytest.mark.parametrize("capability", [AMPERE, HOPPER])
def test_fp8_caches_can_be_copied(capability: tuple[int, int]) -> None:
    backend = TritonBackend(capability)
    cache = backend.allocate(3, KVSpec(1, 16, 4, torch.float32, DEVICE, E4M3))
    bytes_of(cache[0])[1] = 7
    backend.copy_blocks(cache, torch.tensor([[1, 2]], device=DEVICE))
    assert bytes_of(cache[0])[2].eq(7).all() and bytes_of(cache[0])[0].eq(0).all()


def test_padding_writes_nothing_and_gives_zeros() -> None:
    """Padding as in captured graphs: no keys, and a slot below 0."""
    backend = TritonBackend(HOPPER)
    cache = backend.allocate(4, KVSpec(1, 16, 4, torch.float32, DEVICE))
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([1, 0], dtype=torch.int32, device=DEVICE),
        block_tables=torch.tensor([[2], [0]], dtype=torch.int32, device=DEVICE),
        slots=torch.tensor([8, -1], device=DEVICE),
        num_decodes=2,
        max_query_len=1,
        max_seq_len=600,
    )
    ones = torch.ones(2, 1, 16, device=DEVICE)
    output = backend.forward(ones, ones, ones, cache, metadata, LayerParams(1.0))
    assert output[0].eq(1).all() and output[1].eq(0).all()
    assert [int(part.count_nonzero()) for part in cache] == [16, 16]


def test_scratch_is_kept_and_grows_rarely() -> None:
    scratch = Scratch()
    first = scratch.take("parts", 100, CPU)
    assert scratch.take("parts", 128, CPU) is first and scratch.take("sums", 9, CPU) is not first
    larger = scratch.take("parts", 129, CPU)
    assert larger.numel() == 256 and scratch.take("parts", 5, CPU) is larger


def test_an_older_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs compute capability 8.0, this device has 7.5"):
        TritonBackend((7, 5))


@pytest.mark.parametrize("name", ["auto", "flash"])
def test_flash_reads_no_fp8(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FlashBackend, "reads_blocks", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: HOPPER)
    wanted = torch.device("cuda"), torch.bfloat16
    if name == "flash":
        with pytest.raises(ConfigError, match="use attention_backend triton, or kv_cache_dtype"):
            attention.select(name, *wanted, cache_dtype=E5M2)
        return
    with caplog.at_level(logging.INFO):
        assert attention.select(name, *wanted, cache_dtype=E5M2).name == "triton"
    assert "flash reads no KV cache in fp8" in vars(caplog.records[0])["reason"]


def test_too_large_a_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="head sizes up to 256, not 320"):
        TritonBackend(HOPPER).allocate(1, KVSpec(1, 320, 16, torch.float32, DEVICE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_auto_chooses_triton_if_flash_cannot_read_small_blocks(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: HOPPER)
    with caplog.at_level(logging.INFO):
        assert attention.select("auto", torch.device("cuda"), dtype).name == "triton"
    (record,) = caplog.records
    assert "attention_backend flash" in vars(record)["reason"]


def test_auto_chooses_flash_if_it_can_read_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashBackend, "reads_blocks", lambda *_: True)
    assert attention.select("auto", torch.device("cuda"), torch.bfloat16).name == "flash"


def test_auto_falls_back_on_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    assert attention.select("auto", torch.device("cuda"), torch.float32).name == "reference"
