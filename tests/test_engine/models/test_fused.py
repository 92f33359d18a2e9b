"""The fused decoder against the one in plain torch, for every instruction set that this CPU runs.

Covers ragged batches, biases, head norms, windows, soft caps, output norms, mixtures of experts,
odd sizes, rows with no logits, threads, weights in 8 bits, broken numbers. test_models compares
greedy tokens with those of transformers.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.errors import ConfigError
from headrace_engine.core.request import EngineRequest, Sequence
from headrace_engine.core.step_plan import ScheduledSequence, SchedulerOutput
from headrace_engine.kernels.cpu import library
from headrace_engine.kernels.cpu.executor import Executor
from headrace_engine.layers.mxfp4_weight import MXFP4Weight
from headrace_engine.layers.quantized_weight import QuantizedWeight
from headrace_engine.model_runner.input_batch import build
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.models.base import CausalModel
from headrace_engine.models.decoder.fused import FusedDecoder
from headrace_engine.models.decoder.fused_layers import GatedLinear
from headrace_engine.models.linear.native_linear import NativeLinear
from headrace_testing.checkpoints import VOCAB, save_checkpoint
from headrace_testing.cpu_levels import chosen_sets
from headrace_testing.engines import make_runner
from headrace_testing.gguf_checkpoints import save_gguf
from headrace_testing.quantized import gptq, save_quantized

Runs = tuple[tuple[int, int], ...]

BLOCK_SIZE = 4
# (tokens already computed, tokens of this step): prefills, chunks of prefills, single rows
PREFILL = ((1, 1), (37, 37), (5, 5), (70, 70))
MIXED = ((40, 1), (9, 1), (30, 13), (50, 50), (17, 17))
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "vocab_size": 250},
    "llama3-rope": {"intermediate_size": 112},
    "qwen2-window": {},
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 2},
}
# Features that some models lack, each with both kinds of its layers.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {"intermediate_size": 112},
    "gemma3": {},
    "phi3-partial": {},
    "smollm3": {},
    "olmo3": {},
    "ministral3": {},
    "glm4": {},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 3},
    "qwen2-moe": {"num_experts": 21, "num_experts_per_tok": 4},
    "qwen3-moe": {},
    "gpt-oss": {},
    "glm4-moe": {},
    "minimax-m2": {},
    "ernie4_5-moe": {},
    "llama4": {},
    "llama4-two": {},
    "deepseek-v2-lite": {},
    "deepseek-v3": {"kv_lora_rank": 80},
    "glm4-moe-lite": {},
}


@pytest.fixture(params=chosen_sets())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(library.FORCE_ISA, request.param)
    return str(request.param)


def step_of(runs: Runs, samples: bool = True) -> SchedulerOutput:
    """A step with one sequence for each run, of random tokens in blocks of its own."""
    rng = np.random.default_rng(5)
    scheduled, block = [], 0
    for index, (known, length) in enumerate(runs):
        ids = rng.integers(0, 250, known).tolist()
        request = EngineRequest(
            request_id=str(index), prompt_token_ids=tuple(ids), params=SamplingParams(), seed=0
        )
        count = -(-known // BLOCK_SIZE)
        sequence = Sequence(request, 0, ids, block_table=list(range(block, block + count)))
        block += count
        scheduled.append(ScheduledSequence(sequence, known - length, length, samples))
    return SchedulerOutput(tuple(scheduled), (), sum(length for _, length in runs))


def logits_of(
    runner: ModelRunner,
    runs: Runs = PREFILL,
    model: CausalModel | None = None,
) -> torch.Tensor:
    """The logits of the runs' last tokens, after everything before the runs was computed; of the
    runner's model or of another one."""
    scheduler_output = step_of(runs)
    before = tuple(
        ScheduledSequence(item.sequence, 0, item.start, False)
        for item in scheduler_output.scheduled
        if item.start
    )
    runner._allocate(64)
    caches = runner._caches
    with torch.inference_mode():
        if before:
            first = SchedulerOutput(before, (), sum(item.length for item in before))
            forward(runner, first, caches, model)
        return forward(runner, scheduler_output, caches, model).float().clone()


def forward(
    runner: ModelRunner,
    scheduler_output: SchedulerOutput,
    caches: Any,
    model: CausalModel | None = None,
) -> torch.Tensor:
    batch = build(scheduler_output, BLOCK_SIZE, runner.device).forward
    return (model or runner.model).forward(batch, caches)


class Plain:
    """The results of plain torch for checkpoints by name, computed once for all instruction
    sets."""

    def __init__(self, folders: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> None:
        self._folders, self._checkpoint = folders, checkpoint
        self.folder, self.logits = cache(self._folder), cache(self._logits)
        self._runner = cache(make_runner)

    def _folder(self, name: str, dtype: str = "float32") -> Path:
        changes = (SHAPES | FAMILIES)[name]
        if not changes and dtype == "float32":
            return self._checkpoint(name)
        return save_checkpoint(
            self._folders.mktemp(name), name, dtype=getattr(torch, dtype), **changes
        )

    def _logits(
        self, name: str, runs: Runs, stored: str = "float32", dtype: str = "float32"
    ) -> torch.Tensor:
        return logits_of(self._runner(self.folder(name, stored), dtype=dtype), runs)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> Plain:
    return Plain(tmp_path_factory, checkpoint)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("runs", [PREFILL, MIXED, ((3, 1),)], ids=["prefill", "mixed", "one"])
def test_float32_logits_equal_those_of_plain_torch(
    name: str, runs: Runs, isa: str, plain: Plain
) -> None:
    fused = make_runner(plain.folder(name), attention_backend="cpu")
    assert isinstance(fused.model, FusedDecoder)
    found, expected = logits_of(fused, runs), plain.logits(name, runs)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_all_families_give_the_logits_of_plain_torch_in_one_call_and_layer_by_layer(
    name: str, isa: str, plain: Plain
) -> None:
    fused = make_runner(plain.folder(name), attention_backend="cpu")
    assert isinstance(fused.model, FusedDecoder)
    for runs in (PREFILL, MIXED, ((3, 1),)):
        found, expected = logits_of(fused, runs), plain.logits(name, runs)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    found = logits_of(fused, MIXED, fused.model._layered)
    torch.testing.assert_close(found, plain.logits(name, MIXED), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mixtral", "deepseek-v3"])
def test_bfloat16_logits_are_as_exact_as_plain_torch(name: str, isa: str, plain: Plain) -> None:
    exact = plain.logits(name, PREFILL, "bfloat16", "float32")
    rounded = plain.logits(name, PREFILL, "bfloat16", "bfloat16")
    folder = plain.folder(name, "bfloat16")
    found = logits_of(make_runner(folder, dtype="bfloat16", attention_backend="cpu"))
    assert error(found, exact) < 1.2 * error(rounded, exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "llama3-rope", "gemma2"])
def test_weights_in_8_bits_have_small_errors(name: str, dtype: str, isa: str, plain: Plain) -> None:
    options = {"attention_backend": "cpu", "quantization": "int8"}
    found = logits_of(make_runner(plain.folder(name, dtype), dtype=dtype, **options), MIXED)
    assert error(found, plain.logits(name, MIXED, dtype)) < 0.07


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The error of the logits, relative to their spread."""
    return float((found - exact).pow(2).mean().sqrt() / exact.std())


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", ["qwen2", "gemma3", "qwen2-moe"])
def test_logits_do_not_depend_on_threads_or_on_the_batch(
    name: str, quantization: str, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, name)
    options = {"attention_backend": "cpu", "quantization": quantization}
    found = [logits_of(make_runner(folder, threads=count, **options), MIXED) for count in (1, 2, 5)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    alone = logits_of(make_runner(folder, **options), MIXED[:1])
    assert torch.equal(alone[0], found[0][0])


def test_a_step_without_logits_writes_the_cache(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama")
    runner = make_runner(folder, attention_backend="cpu")
    runner._allocate(64)
    caches = runner._caches
    assert forward(runner, step_of(PREFILL, samples=False), caches).shape == (0, VOCAB)
    assert all(bool(cache[0].any()) for cache in caches)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_broken_weights_give_broken_logits(quantization: str, isa: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama")
    runner = make_runner(folder, attention_backend="cpu", quantization=quantization)
    model = runner.model
    assert isinstance(model, FusedDecoder)
    with torch.inference_mode():
        model._weights.tensors["model.embed_tokens.weight"].fill_(torch.nan)
    assert not bool(logits_of(runner).isfinite().any())


def test_8_bits_are_refused_where_unsupported(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match="quantization int8 needs"):
        make_runner(folder, attention_backend="reference", quantization="int8")
    with pytest.raises(ConfigError, match="quantization int8 needs"):
        make_runner(folder, attention_backend="cpu", quantization="int8", dtype="float16")
    with pytest.raises(ConfigError, match="quantization int8 needs"):
        make_runner(folder, quantization="int8", model_implementation="transformers")


def test_sizes_that_are_not_a_multiple_of_a_vector_are_computed_by_torch(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama", intermediate_size=100)
    runner = make_runner(folder, attention_backend="cpu")
    assert not isinstance(runner.model, FusedDecoder)
    expected = logits_of(make_runner(folder))
    torch.testing.assert_close(logits_of(runner), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 1), (96, 70), (272, 128)])
@pytest.mark.parametrize("quantize", [False, True], ids=["whole", "8 bits"])
def test_linear_layers(
    isa: str, dtype: torch.dtype, inputs: int, outputs: int, quantize: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    executor = Executor(library.load(isa), 2)
    layer = executor.pack([weight], [bias], quantize)
    for rows in (1, 2, 7, 40):
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        expected = x.float() @ weight.float().T + bias.float()
        error_ = (executor.linear(layer, x) - expected).pow(2).mean().sqrt()
        assert error_ < (0.02 if quantize else 1e-6) * inputs**0.5


@pytest.mark.parametrize(("inputs", "groups", "gated"), [(96, 1, False), (256, 2, True)])
def test_weights_stored_in_4_bits_are_not_converted(
    isa: str, inputs: int, groups: int, gated: bool
) -> None:
    """The only error is that of activations in 8 bits, and these activations are exact."""
    generator = torch.Generator().manual_seed(0)
    outputs = 2 * 70
    weight = QuantizedWeight(
        values=torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8),
        scales=torch.rand(outputs, groups, generator=generator) + 0.5,
        zeros=torch.randint(0, 17, (outputs, groups), generator=generator).float(),
        groups=None,
        bits=4,
    )
    bias = torch.randn(outputs, generator=generator)
    executor = Executor(library.load(isa), 2)
    layer = executor.pack_quantized(weight, [bias], gated)
    for rows in (1, 2, 7, 40):
        x = torch.randint(-127, 128, (rows, inputs), generator=generator).float()
        x[:, ::64] = 127.0  # each group's scale is 1
        expected = x @ weight.dequantize().T + bias
        found = executor.linear(layer, x)
        if gated:
            half = executor.padded(1) // 2
            pairs = found.view(rows, -1, 2, half).transpose(1, 2).flatten(2)
            found = pairs[..., : outputs // 2].flatten(1)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize(("inputs", "gated"), [(96, False), (320, True)])
def test_4_bit_floats_are_not_converted(inputs: int, gated: bool, isa: str) -> None:
    """Only the activations are rounded, to 8 bits."""
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (70, inputs // 32, 16), generator=generator)
    scales = torch.randint(120, 127, (70, inputs // 32), generator=generator)
    weight = MXFP4Weight(blocks.to(torch.uint8), scales.to(torch.uint8))
    x, bias = (torch.randn(*size, generator=generator) for size in ((9, inputs), (70,)))
    x = (x * 127 / x.abs().amax(1, keepdim=True)).round()
    x[:, ::64] = 127.0  # each group's scale is 1, and all of x whole
    executor = Executor(library.load(isa), 2)
    packed = executor.pack_floats(weight.codes(), [bias], gated)
    assert packed.weight.numel() == executor.padded(packed.outputs) * inputs // 2
    made = NativeLinear(executor, packed)
    linear = GatedLinear(made, executor.padded(1) // 2, 35) if gated else made
    expected = x.double() @ weight.dequantize().double().T + bias
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-4)


def test_a_mixture_stored_in_4_bits_has_only_the_rounding_errors_of_activations(
    isa: str, tmp_path: Path
) -> None:
    packed, whole = save_quantized(tmp_path, "qwen3-moe", gptq(size=64), moe_intermediate_size=64)
    exact = logits_of(make_runner(whole), MIXED)
    runner = make_runner(packed, attention_backend="cpu")
    assert isinstance(runner.model, FusedDecoder)
    layers = runner.model._weights.linears
    assert sum(layer.zeros is not None for layer in layers.values()) > 0.8 * len(layers)
    assert error(logits_of(runner, MIXED), exact) < 0.07


@pytest.fixture(scope="module")
def gguf(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], tuple[Path, torch.Tensor]]:
    """A GGUF file with matrices of a type, and plain torch's logits of the same weights."""

    @cache
    def make(name: str, kind: str) -> tuple[Path, torch.Tensor]:
        sparse = {"mlp_only_layers": [], "norm_topk_prob": True, "moe_intermediate_size": 256}
        file, whole = save_gguf(
            tmp_path_factory.mktemp(name),
            name,
            lambda tensor: (
                "F32" if "gate_inp" in tensor else "Q6_K" if "attn_v" in tensor else kind
            ),
            **(sparse if "moe" in name else {}),
        )
        return file, logits_of(make_runner(whole), MIXED)

    return make


@pytest.mark.parametrize(
    ("kind", "dtype", "most"),
    [("Q8_0", "bfloat16", 0.05), ("Q4_K", "bfloat16", 0.05), ("Q4_K", "float32", 1e-4)],
)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3-moe"])
def test_a_gguf_file_keeps_its_blocks(
    name: str,
    kind: str,
    dtype: str,
    most: float,
    isa: str,
    gguf: Callable[[str, str], tuple[Path, torch.Tensor]],
) -> None:
    """All matrices but routers, also the embedding, and in steps that are computed layer by
    layer."""
    file, exact = gguf(name, kind)
    runner = make_runner(file, attention_backend="cpu", dtype=dtype)
    assert isinstance(runner.model, FusedDecoder)
    weights = runner.model._weights
    packed = {name[0] for name, layer in weights.linears.items() if layer.panels is not None}
    routers = {name[0] for name in weights.linears if name[0].endswith("mlp.gate.weight")}
    assert packed | routers == {name[0] for name in weights.linears}
    assert "model.embed_tokens.weight" in packed and len(weights.tensors) < len(packed)
    for found in (logits_of(runner, MIXED), logits_of(runner, MIXED, runner.model._layered)):
        if name == "qwen3-moe" and dtype == "bfloat16":
            # A router may choose another expert, which changes a token and those that attend to it.
            errors = torch.tensor([error(*rows) for rows in zip(found, exact, strict=True)])
            assert errors.quantile(0.25) < most
        else:
            assert error(found, exact) < most


def test_many_threads_share_short_loops(isa: str) -> None:
    """More threads than cores, so that helpers are late for most loops."""
    executor = Executor(library.load(isa), 8)
    x = torch.randn(9, 100, generator=torch.Generator().manual_seed(0))
    expected = x.argmax(-1)
    for _ in range(500):
        indices, values = executor.argmax(x)
        assert torch.equal(indices, expected)
        assert torch.equal(values, x.amax(-1))
