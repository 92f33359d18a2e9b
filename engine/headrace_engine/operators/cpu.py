"""The decoder's element-wise operators through the native kernels.

They take float32 and bfloat16 on CPUs; plain torch computes other dtypes and memory layouts.
Results overwrite inputs only where the `Ops` protocol allows it.
"""

import importlib
import logging

import torch

from ..kernels.cpu.executor import Executor
from ..kernels.cpu.library import DTYPES, Kernels, KernelsUnavailable, load
from ..kernels.cpu.self_check import multiplies_correctly
from .base import HeadShape, Ops, QKNorm, TorchOps, row_stride
from .cpu_recurrent import NativeRecurrences

logger = logging.getLogger(__name__)

AMX, WITHOUT_AMX = "amx", "avx512_bf16"


def make_ops(device: torch.device, deterministic: bool = False) -> Ops:
    """Makes the fastest operators for `device`; a log says why if native ones are not available.

    CPU operators are always `deterministic`: a row's bits do not depend on the other rows.
    """
    if device.type != "cpu":
        return _cuda_ops(deterministic) if device.type == "cuda" else TorchOps()
    try:
        return NativeOps(_checked(load()))
    except KernelsUnavailable as error:
        logger.warning("no native kernels, operators will be slow", extra={"reason": str(error)})
        return TorchOps()


def _cuda_ops(deterministic: bool) -> Ops:
    module, name = (
        ("batch_invariant", "BatchInvariantOps") if deterministic else ("triton", "TritonOps")
    )
    try:
        ops: Ops = getattr(importlib.import_module(f"headrace_engine.operators.{module}"), name)()
    except ImportError as error:
        logger.warning("no Triton, operators will be slow", extra={"reason": str(error)})
        return TorchOps()
    return ops


def _checked(kernels: Kernels) -> Kernels:
    """Returns the kernels, or those without AMX if AMX computes wrong products on this machine."""
    if kernels.isa != AMX or multiplies_correctly(kernels):
        return kernels
    logger.warning("AMX gives wrong products on this machine and is not used")
    return load(WITHOUT_AMX)


class NativeOps:
    """Operators through the native kernels; plain torch for what those do not support."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.executor = Executor(kernels, torch.get_num_threads())
        self.recurrences = NativeRecurrences(self.executor)
        self._torch = TorchOps()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        stride = row_stride(x)
        if stride is None or not _is_native(x) or x.dtype is not weight.dtype:
            return self._torch.rms_norm(x, weight, eps)
        output = x.new_empty(x.shape)
        width = x.shape[-1]
        self._kernels.rms_norm(
            output.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            x.numel() // width,
            width,
            stride,
            eps,
            x.dtype is torch.bfloat16,
        )
        return output

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not (_is_native(x) and _is_dense(x) and _is_dense(residual)):
            return self._torch.add_rms_norm(x, residual, weight, eps)
        if not x.dtype is residual.dtype is weight.dtype:
            return self._torch.add_rms_norm(x, residual, weight, eps)
        output = torch.empty_like(x)
        width = x.shape[-1]
        self._kernels.add_rms_norm(
            output.data_ptr(),
            residual.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            x.numel() // width,
            width,
            eps,
            x.dtype is torch.bfloat16,
        )
        return output, residual

    def rotate_qkv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        shape: HeadShape,
        norm: QKNorm | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not (_is_native(qkv) and _is_dense(qkv) and _rotates(cos, sin, shape)):
            return self._torch.rotate_qkv(qkv, cos, sin, shape, norm)
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        tokens, width = qkv.shape
        self._kernels.rotate_qkv(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            norm.query.data_ptr() if norm else None,
            norm.key.data_ptr() if norm else None,
            tokens,
            width,
            heads,
            kv_heads,
            dim,
            shape.eps,
            qkv.dtype is torch.bfloat16,
        )
        rows = qkv.view(tokens, heads + 2 * kv_heads, dim)
        keys, values = heads, heads + kv_heads
        return rows[:, :keys], rows[:, keys:values], rows[:, values:]

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if not (_is_native(gate_up) and _is_dense(gate_up)):
            return self._torch.silu_mul(gate_up)
        double = gate_up.shape[-1]
        width = double // 2
        output = gate_up.new_empty((*gate_up.shape[:-1], width))
        self._kernels.silu_mul(
            output.data_ptr(),
            gate_up.data_ptr(),
            gate_up.numel() // double,
            width,
            double,
            gate_up.dtype is torch.bfloat16,
        )
        return output

    def argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not (_is_native(x) and x.stride(-1) == 1):
            return self._torch.argmax(x)
        return self.executor.argmax(x)


def _is_native(x: torch.Tensor) -> bool:
    return x.dtype in DTYPES and not x.is_cuda and x.numel() > 0


def _is_dense(x: torch.Tensor) -> bool:
    return x.is_contiguous()


def _rotates(cos: torch.Tensor, sin: torch.Tensor, shape: HeadShape) -> bool:
    """Whether the tables are float32 and rotate whole heads, by halves."""
    wanted = shape.head_dim // 2
    return (
        not shape.interleaved
        and cos.dtype is sin.dtype is torch.float32
        and cos.shape[-1] == sin.shape[-1] == wanted
        and cos.is_contiguous()
        and sin.is_contiguous()
    )
