"""What the Triton backend and operators launch, recorded on tensors without memory.

Torch's meta tensors raise if the host asks for their numbers, so a launch that needs one fails
here. Nothing is compiled and no device is needed.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from headrace_engine.attention import triton as attention
from headrace_engine.attention.base import AttentionMetadata, KVSpec, LayerParams
from headrace_engine.attention.fp8 import ADA
from headrace_engine.model import invariant, triton_float8, triton_ops
from headrace_engine.model.ops import HeadShape, QKNorm
from headrace_engine.model.qkv import QKVRows
from headrace_engine.model.quantization.float8_weight import Float8Weight
from headrace_engine.model.static_batch import DecodeInputs, stage_by_kernel
from headrace_engine.triton_kernels import staging

META = torch.device("meta")
OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model's shape kernels are compiled for. `tokens` prefill, `decodes` decode; both
    with contexts of `context` keys."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    qk_norm: bool = False
    params: LayerParams = field(default=LayerParams(0.1))
    tokens: int = 1024
    decodes: int = 1
    context: int = 1024

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A kernel, its arguments by name, the grid and Triton's options."""

    kernel: Any
    bound: dict[str, Any]
    grid: tuple[int, ...]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


class _Recorder:
    """Stands where a kernel stands."""

    def __init__(self, kernel: Any, found: list[KernelLaunch]) -> None:
        self._kernel, self._found = kernel, found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(extent > 0 for extent in grid)

        def launch(*arguments: Any, **named: Any) -> None:
            options = {key: named.pop(key) for key in OPTIONS if key in named}
            bound = dict(zip(self._kernel.arg_names, arguments, strict=False)) | named
            self._found.append(KernelLaunch(self._kernel, bound, grid, options))

        return launch


def record(run: Callable[[], object]) -> list[KernelLaunch]:
    """What `run` launches of this project's kernels."""
    found: list[KernelLaunch] = []
    with ExitStack() as stack:
        for module, name in _kernels():
            recorder = _Recorder(getattr(module, name), found)
            stack.enter_context(patch.object(module, name, recorder))
        run()
    return found


def _kernels() -> Iterator[tuple[Any, str]]:
    for module in (attention, invariant, triton_float8, triton_ops, staging):
        for name in vars(module):
            if name.endswith("_kernel"):
                yield module, name


def model_launches(capability: int, shape: ModelShape) -> list[KernelLaunch]:
    """Every kernel that steps of such a model launch on a device of this capability, as 90."""

    def run() -> None:
        _attend(capability, shape)
        _operate(shape)
        if shape.cache_dtype is not None:
            _multiply_float8(divmod(capability, 10), shape)

    return record(run)


def _attend(capability: int, shape: ModelShape) -> None:
    device = divmod(capability, 10)
    backend = attention.TritonBackend(device)
    deterministic = attention.TritonBackend(device, deterministic=True)
    spec = KVSpec(shape.kv_heads, shape.head_dim, 16, shape.dtype, META, shape.cache_dtype)
    cache = backend.allocate(2, spec)
    decodes, prefill = decode_metadata(shape.decodes, shape.context), _prefill_metadata(shape)
    backend.forward_qkv(_rows(shape, shape.decodes), cache, decodes, shape.params)
    short = decode_metadata(shape.decodes, 16)
    backend.forward_qkv(_rows(shape, shape.decodes), cache, short, shape.params)
    backend.forward_qkv(_rows(shape, shape.tokens), cache, prefill, shape.params)
    deterministic.forward_qkv(_rows(shape, shape.tokens), cache, prefill, shape.params)
    query, key = (
        made(shape.tokens, heads, shape.head_dim, dtype=shape.dtype)
        for heads in (shape.heads, shape.kv_heads)
    )
    backend.forward(query, key, key, cache, prefill, shape.params)


def decode_metadata(sequences: int, context: int) -> AttentionMetadata:
    return _metadata(sequences, sequences, 1, context, sequences)


def _prefill_metadata(shape: ModelShape) -> AttentionMetadata:
    return _metadata(1, shape.tokens, shape.tokens, shape.context, 0)


def _metadata(
    sequences: int, tokens: int, longest: int, context: int, decodes: int
) -> AttentionMetadata:
    return AttentionMetadata(
        query_start=made(sequences + 1, dtype=torch.int32),
        seq_lens=made(sequences, dtype=torch.int32),
        block_tables=made(sequences, -(-context // 16), dtype=torch.int32),
        slots=made(tokens, dtype=torch.int64),
        num_decodes=decodes,
        max_query_len=longest,
        max_seq_len=context,
    )


def _rows(shape: ModelShape, tokens: int) -> QKVRows:
    angles = made(tokens, shape.head_dim // 2)
    head = made(shape.head_dim, dtype=shape.dtype)
    heads = HeadShape(shape.heads, shape.kv_heads, shape.head_dim)
    qkv = made(tokens, shape.qkv_width, dtype=shape.dtype)
    return QKVRows(qkv, angles, angles, heads, QKNorm(head, head) if shape.qk_norm else None)


def _operate(shape: ModelShape) -> None:
    ops = triton_ops.TritonOps()
    hidden, other = (made(2, shape.hidden, dtype=shape.dtype) for _ in range(2))
    weight = made(shape.hidden, dtype=shape.dtype)
    ops.rms_norm(hidden, weight, 1e-6)
    ops.add_rms_norm(hidden, other, weight, 1e-6)
    ops.silu_mul(made(2, 2 * shape.inner, dtype=shape.dtype))
    stage_by_kernel(_inputs(1), _inputs(2), 2)
    rows = _rows(shape, 2)
    ops.rotate_qkv(rows.qkv, rows.cos, rows.sin, rows.shape, rows.norm)
    linear = made(shape.qkv_width, shape.hidden, dtype=shape.dtype)
    invariant.InvariantLinear(linear, None)(hidden)


def _multiply_float8(capability: tuple[int, int], shape: ModelShape) -> None:
    """Weights in fp8 beside such a cache, a scale for each 128 inputs; rows are rounded where there
    are instructions for it."""
    hidden = made(shape.tokens, shape.hidden, dtype=shape.dtype)
    values = made(shape.qkv_width, shape.hidden, dtype=torch.float8_e4m3fn)
    weight = Float8Weight(values, made(shape.qkv_width, shape.hidden // 128), 128)
    layer = triton_float8.WidenedLinear(weight, None, META, capability)
    layer(hidden)
    layer(hidden[: shape.decodes])
    if capability >= ADA:
        triton_float8.round_rows(hidden)


def _inputs(sequences: int) -> DecodeInputs:
    long, metadata = made(sequences, dtype=torch.int64), decode_metadata(sequences, 1024)
    return DecodeInputs(long, long, long, metadata.seq_lens, metadata.block_tables)


def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)
