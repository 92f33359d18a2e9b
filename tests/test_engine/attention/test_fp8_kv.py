"""A KV cache in 8-bit floats, in whole engines: twice the blocks, tokens that do not depend on the
scheduling of a request, the scales of checkpoints, refusals. test_cpu_attention and
test_triton_attention test what backends compute with such caches."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_engine.attention.reference import ReferenceBackend
from headrace_engine.core.errors import CheckpointError, ConfigError
from headrace_engine.core.request import Sequence
from headrace_engine.core.step_plan import ScheduledSequence, SchedulerOutput
from headrace_engine.engine.engine import Engine
from headrace_engine.layers.fp8_cache import E4M3, E5M2, dequantize_kv, quantize_kv
from headrace_engine.model_runner.input_batch import build
from headrace_testing.checkpoints import save_checkpoint
from headrace_testing.engines import cpu_backends, engine_config, greedy, make_runner, request, run

FILE = "model.safetensors"
native_kernels = pytest.mark.skipif("cpu" not in cpu_backends(), reason="no native kernels")
LENGTH = 12
PROMPTS = [tuple(3 + (7 * at + 5 * row) % 60 for at in range(20 + row)) for row in range(3)]
KEY, VALUE = 0.0625, 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("fp8") / "llama", "llama")


def engine_of(folder: Path, **options: Any) -> Engine:
    options = {"kv_cache_dtype": "fp8", **options}
    return Engine(engine_config(folder, **options), make_runner(folder, **options))


def outputs(folder: Path, **options: Any) -> list[tuple[int, ...]]:
    requests = [request(str(row), prompt, greedy(LENGTH)) for row, prompt in enumerate(PROMPTS)]
    found = run(engine_of(folder, **options), requests)
    return [tuple(found[str(row), 0].token_ids) for row in range(len(PROMPTS))]


def logits(folder: Path, **options: Any) -> torch.Tensor:
    """Logits of every position of a prompt; the second half is computed over a cache of the
    first."""
    runner = make_runner(folder, **options)
    ids, half = [3 + 7 * at % 60 for at in range(60)], 30
    sequence = Sequence(request("a", ids, greedy(1)), 0, ids, block_table=list(range(15)))
    steps = [ScheduledSequence(sequence, start, half, samples=True) for start in (0, half)]
    found = []
    with torch.inference_mode():
        for step in steps:
            batch = build(SchedulerOutput((step,), (), half), 4, runner.device).forward
            every = replace(batch, logits_rows=torch.arange(half))
            found.append(runner.model.forward(every, runner._caches).clone())
    return torch.cat(found)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).pow(2).mean().sqrt())


@native_kernels
@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_native_steps_round_as_the_reference_does(
    name: str, cache_dtype: str, tmp_path: Path
) -> None:
    """A difference in the last bit before rounding may become a whole step afterwards, which is
    rare: the two results are far closer to each other than to unrounded keys and values."""
    folder = save_checkpoint(tmp_path / name, name)
    exact = logits(folder)
    reference = logits(folder, kv_cache_dtype=cache_dtype)
    native = logits(folder, kv_cache_dtype=cache_dtype, attention_backend="cpu")
    assert distance(native, reference) < 0.2 * distance(reference, exact)


def test_transformers_models_store_fp8_kv_too(folder: Path) -> None:
    exact, native = logits(folder), logits(folder, kv_cache_dtype="fp8")
    found = logits(folder, kv_cache_dtype="fp8", model_implementation="transformers")
    assert distance(found, native) < 0.2 * distance(native, exact)


@native_kernels
def test_the_same_tokens_however_a_request_is_scheduled(folder: Path) -> None:
    options: dict[str, Any] = {"attention_backend": "cpu", "deterministic": True}
    expected = outputs(folder, **options)
    assert outputs(folder, max_num_batched_tokens=9, **options) == expected  # in chunks
    assert outputs(folder, max_num_seqs=1, **options) == expected  # alone
    assert outputs(folder, num_blocks=18, **options) == expected  # preempted
    assert outputs(folder, num_blocks=18, swap_space=0.01, **options) == expected  # swapped


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v32", "glm-moe-dsa-shared", "mimo-v2"])
def test_tokens_of_caches_with_other_layouts_do_not_depend_on_the_schedule(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    """Latents, an indexer's keys, and layers with other numbers of KV heads."""
    folder, options = checkpoint(name), {"enable_prefix_caching": False}
    expected = outputs(folder, **options)
    exact = outputs(folder, kv_cache_dtype="auto", **options)
    assert expected != exact, "8 bits should matter"
    assert outputs(folder, max_num_batched_tokens=9, **options) == expected
    assert outputs(folder, num_blocks=26, watermark=0.0, **options) == expected
    swapping = {"swap_space": 0.01, **options}
    assert outputs(folder, num_blocks=26, watermark=0.0, **swapping) == expected


def test_a_prefix_is_found_in_the_cache_again(folder: Path) -> None:
    engine = engine_of(folder)
    first, second = (
        run(engine, [request(name, PROMPTS[0], greedy(LENGTH))])[name, 0] for name in ("a", "b")
    )
    assert first.cached_tokens == 0 and second.cached_tokens > 0
    assert len(second.token_ids) == LENGTH


def test_fp8_caches_have_twice_as_many_blocks_as_bfloat16(folder: Path) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": None, "kv_cache_bytes": 10**6}
    whole, half = (
        make_runner(folder, kv_cache_dtype=name, **options) for name in ("auto", "fp8_e5m2")
    )
    assert half.num_blocks in (2 * whole.num_blocks, 2 * whole.num_blocks + 1)


def with_scales(folder: Path, names: tuple[str, str], *scales: torch.Tensor) -> Path:
    tensors = load_file(folder / FILE)
    for index in range(2):
        attention = f"model.layers.{index}.self_attn."
        tensors |= {attention + name: one.clone() for name, one in zip(names, scales, strict=True)}
    save_file(tensors, folder / FILE, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize("backend", cpu_backends())
def test_scales_of_checkpoints_are_used(
    names: tuple[str, str], backend: str, tmp_path: Path
) -> None:
    """Caches hold keys and values divided by the scales; without an 8-bit cache nothing is
    divided."""
    plain = save_checkpoint(tmp_path / "plain", "llama")
    scaled = save_checkpoint(tmp_path / "scaled", "llama")
    with_scales(scaled, names, torch.tensor(KEY), torch.tensor([VALUE]))
    whole = {"kv_cache_dtype": "auto", "attention_backend": backend}
    assert outputs(scaled, **whole) == outputs(plain, **whole)
    found = [largest(folder, backend) for folder in (plain, scaled)]
    for before, after, scale in zip(*found, (KEY, VALUE), strict=True):
        # Powers of two: only subnormal numbers differ.
        assert after == pytest.approx(before / scale)


def largest(folder: Path, backend: str) -> list[float]:
    """The largest key and value of the first layer that a prompt leaves in the cache."""
    options: dict[str, Any] = {"kv_cache_dtype": "fp8", "attention_backend": backend}
    runner = make_runner(folder, **options)
    run(Engine(engine_config(folder, **options), runner), [request("a", PROMPTS[0], greedy(1))])
    cache = runner._caches[0]
    parts = cache if backend == "reference" else cache[0].unbind(-2)
    return [float(part.float().abs().max()) for part in parts]


@pytest.mark.parametrize("scale", [torch.ones(2), torch.tensor(-1.0), torch.tensor(torch.nan)])
def test_other_scales_are_refused(scale: torch.Tensor, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama")
    with_scales(folder, ("k_scale", "v_scale"), torch.tensor(1.0), scale)
    with pytest.raises(CheckpointError, match=r"layers.0.self_attn.v_scale must be one number"):
        make_runner(folder, kv_cache_dtype="fp8")


def test_unknown_cache_dtypes_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, fp8, fp8_e4m3"):
        make_runner(folder, kv_cache_dtype="int8")


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding_is_within_half_a_step(dtype: torch.dtype) -> None:
    """The scaled numbers are normal, so half a step is 2^-4 of a number, or 2^-3 in e5m2."""
    x = torch.randn(4000, generator=torch.Generator().manual_seed(1))
    for scale in (1.0, 0.01, 3.0):
        kept = x[x.abs() / scale > 2.0**-6]
        error = (dequantize_kv(quantize_kv(kept, dtype, scale), scale) - kept).abs() / kept.abs()
        bound = torch.finfo(dtype).eps / 2
        assert bound / 2 < float(error.max()) <= bound * 1.0001


def test_the_reference_copies_blocks_of_bytes(folder: Path) -> None:
    runner = make_runner(folder, kv_cache_dtype="fp8", attention_backend="reference")
    cache = runner._caches[0]
    cache[0].view(torch.uint8)[3] = 9
    ReferenceBackend().copy_blocks(cache, torch.tensor([[3, 5]]))
    assert cache[0].view(torch.uint8)[5].eq(9).all()
