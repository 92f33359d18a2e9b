"""The decoder's operators as Triton kernels, through the interpreter, against plain torch: norms,
the residual sum, gated SiLU, and rotary embedding with and without writing keys and values.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_engine import LLM, SamplingParams, attention
from headrace_engine.attention.triton import TritonBackend
from headrace_engine.core.attention_backend import AttentionMetadata, KVSpec, LayerParams
from headrace_engine.layers.fp8_cache import E4M3, quantize_kv
from headrace_engine.model_loader import loader
from headrace_engine.operators.base import Float32NormOps, HeadShape, Ops, QKNorm, TorchOps
from headrace_engine.operators.qkv import QKVRows
from headrace_engine.operators.triton import TritonOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Plain torch rounds at the same places; sums in another order differ by one step.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
EVERY_DTYPE = pytest.mark.parametrize("dtype", BOUNDS)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    bound = BOUNDS[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


@EVERY_DTYPE
@pytest.mark.parametrize("width", [64, 100])
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    rows, weight = random(5, 2 * width, dtype=dtype), random(width, dtype=dtype, seed=4)
    for x in (rows[:, width:], rows.view(10, width)):
        same(TritonOps().rms_norm(x, weight, 1e-5), TorchOps().rms_norm(x, weight, 1e-5))


@EVERY_DTYPE
def test_rms_norm_of_a_sum(dtype: torch.dtype) -> None:
    x, residual = random(5, 48, dtype=dtype), random(5, 48, dtype=dtype, seed=5)
    weight = random(48, dtype=dtype, seed=4)
    expected = TorchOps().add_rms_norm(x, residual, weight, 1e-5)
    for found, one in zip(
        TritonOps().add_rms_norm(x, residual, weight, 1e-5), expected, strict=True
    ):
        same(found, one)


@EVERY_DTYPE
@pytest.mark.parametrize("width", [48, 1100])
def test_silu_mul(dtype: torch.dtype, width: int) -> None:
    gate_up = random(3, 2 * width, dtype=dtype)
    same(TritonOps().silu_mul(gate_up), TorchOps().silu_mul(gate_up))


class Rotation:
    """Rows of 9 query heads and 3 key heads: more than one program computes."""

    def __init__(
        self,
        dtype: torch.dtype,
        pairs: int = 8,
        normed: bool = False,
        interleaved: bool = False,
    ) -> None:
        self.shape = HeadShape(9, 3, 16, 1e-5, interleaved)
        self.qkv = random(4, 15 * 16, dtype=dtype)
        angles = random(4, pairs, seed=6)
        self.cos, self.sin = angles.cos(), angles.sin()
        weights = random(2, 16, dtype=dtype, seed=7)
        self.norm = QKNorm(weights[0], weights[1]) if normed else None

    def rotated(self, ops: Ops) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return ops.rotate_qkv(self.qkv.clone(), self.cos, self.sin, self.shape, self.norm)

    def rows(self) -> QKVRows:
        return QKVRows(self.qkv.clone(), self.cos, self.sin, self.shape, self.norm)


@EVERY_DTYPE
@pytest.mark.parametrize("pairs", [8, 5])
@pytest.mark.parametrize(("normed", "interleaved"), [(False, False), (True, False), (True, True)])
def test_rotation(dtype: torch.dtype, pairs: int, normed: bool, interleaved: bool) -> None:
    rotation = Rotation(dtype, pairs, normed, interleaved)
    expected = rotation.rotated(TorchOps())
    for found, one in zip(rotation.rotated(TritonOps()), expected, strict=True):
        same(found, one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide_norm", [False, True])
def test_rotation_that_writes_keys_and_values(dtype: torch.dtype, wide_norm: bool) -> None:
    """Writes the same as the separate steps, also with norms in float32 as in Gemma."""
    backend, rotation = TritonBackend((9, 0)), Rotation(dtype, 5, normed=True)
    ops: Ops = TorchOps()
    if wide_norm and rotation.norm is not None:
        ops = Float32NormOps(ops)
        rotation.norm = QKNorm(rotation.norm.query.float(), rotation.norm.key.float())
    spec = KVSpec(3, 16, 4, dtype, DEVICE)
    caches = [backend.allocate(3, spec), backend.allocate(3, spec)]
    metadata, params = two_sequences(), LayerParams(0.25)
    found = backend.forward_qkv(rotation.rows(), caches[0], metadata, params)
    same(found, backend.forward(*rotation.rotated(ops), caches[1], metadata, params))
    for part, expected in zip(*caches, strict=True):
        same(part, expected)
    assert caches[0][1][2, :, 0].eq(rotation.qkv[0, 12 * 16 :].view(3, 16)).all()


def test_rotation_that_writes_8_bit_floats() -> None:
    """Read by bits, because the interpreter otherwise rounds wrongly.

    A difference in the last bit before rounding may become a whole step.
    """
    backend, rotation = TritonBackend((8, 0)), Rotation(torch.float32, 5, normed=True)
    spec = KVSpec(3, 16, 4, torch.float32, DEVICE, E4M3)
    caches = [backend.allocate(3, spec), backend.allocate(3, spec)]
    metadata, params = two_sequences(), LayerParams(0.25, key_scale=0.5, value_scale=3.0)
    found = backend.forward_qkv(rotation.rows(), caches[0], metadata, params)
    expected = backend.forward(*rotation.rotated(TorchOps()), caches[1], metadata, params)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
    for part, other in zip(*caches, strict=True):
        assert part.float().ne(other.float()).sum() <= 2
    values = quantize_kv(rotation.qkv[0, 12 * 16 :].view(3, 16), E4M3, 3.0)
    assert torch.equal(caches[0][1][2, :, 0].float(), values.float())


def two_sequences() -> AttentionMetadata:
    """A decode and a run of two tokens, followed by padding."""
    return AttentionMetadata(
        query_start=torch.tensor([0, 1, 4], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([1, 3], dtype=torch.int32, device=DEVICE),
        block_tables=torch.tensor([[2], [1]], dtype=torch.int32, device=DEVICE),
        slots=torch.tensor([8, 4, 5, -1], device=DEVICE),
        num_decodes=1,
        max_query_len=3,
        max_seq_len=3,
    )


def test_inputs_that_the_kernels_do_not_support_are_computed_by_torch() -> None:
    x, weight = random(4, 32).t(), random(4)
    same(TritonOps().rms_norm(x, weight, 1e-5), TorchOps().rms_norm(x, weight, 1e-5))
    empty = torch.empty(0, 32)
    assert TritonOps().silu_mul(empty).shape == (0, 16)
    indices, values = TritonOps().argmax(random(3, 9))
    assert torch.equal(values, random(3, 9).max(1).values) and indices.shape == (3,)


def test_a_model_gives_the_tokens_of_the_reference(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps have chunks of prompts and decodes, with grouped heads and QK norms. Triton
    computes every step."""
    folder: Path = checkpoint("qwen3")
    prompts: list[Any] = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (18, 4)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=3)
    tokens = []
    for backend in ("reference", "triton"):
        if backend == "triton":
            monkeypatch.setattr(attention, "select", lambda *_: TritonBackend((9, 0)))
            monkeypatch.setattr(loader, "make_ops", lambda *_: TritonOps())
        llm = LLM(
            str(folder), dtype="float32", device=DEVICE.type, attention_backend=backend,
            num_blocks=32, max_num_seqs=4, max_num_batched_tokens=16,
        )  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]
