"""The element-wise operators of a decoder, as one small protocol.

`TorchOps` is plain torch, correct on every device and dtype, and the reference in the tests of
native kernels. A faster set implements the same methods and is passed to the model instead.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch.nn import functional as F

from ..kernels.triton.dependent_launch import DependentLaunches


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How a fused QKV row is split: queries, keys, then values. `eps` is that of the QK norms;
    `interleaved` says which elements of a head are rotated together."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float = 1e-6
    interleaved: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        kv = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv, kv


@dataclass(frozen=True, slots=True)
class QKNorm:
    """Weights [head_dim] of the RMS norms that Qwen3 applies to each query and key head."""

    query: torch.Tensor
    key: torch.Tensor


class Ops(Protocol):
    """The operators that a decoder needs besides matrix products and attention."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., H] divided by its root mean square over H (in float32), times weight [H]."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual); may write into `residual`."""

    def rotate_qkv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        shape: HeadShape,
        norm: QKNorm | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Splits qkv [T, (Hq + 2 Hkv) * D] into q [T, Hq, D], k and v [T, Hkv, D].

        q and k are normalised if `norm` is given, then rotated: element i of the first half pairs
        with element i of the second half; if interleaved, element 2 i pairs with 2 i + 1. cos and
        sin are float32 [T, D / 2], or narrower if only the first elements of a head are rotated.
        `norm` has qkv's dtype. May write into `qkv`; the results may be views of it (strided rows,
        contiguous heads).
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of gate_up [T, 2 I], the gate first: [T, I]."""

    def argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The first largest element of each row of x [N, V]: its index, int64 [N], and its value,
        of any float dtype [N]. NaN is the largest."""


class TorchOps:
    """Plain torch; rounds to the tensors' dtype where transformers does."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rotate_qkv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        shape: HeadShape,
        norm: QKNorm | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = (
            part.view(len(qkv), -1, shape.head_dim)
            for part in torch.split(qkv, list(shape.sizes), dim=-1)
        )
        if norm is not None:
            query = self.rms_norm(query, norm.query, shape.eps)
            key = self.rms_norm(key, norm.key, shape.eps)
        query = rotate_heads(query, cos, sin, interleaved=shape.interleaved)
        return query, rotate_heads(key, cos, sin, interleaved=shape.interleaved), value

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.device.type != "cpu":
            return _argmax_together(x)
        # numpy uses vector instructions here on CPUs, torch does not.
        indices = torch.from_numpy(x.float().numpy().argmax(-1))
        return indices, x.gather(1, indices[:, None]).squeeze(1)


def _argmax_together(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes indices and values, in one launch, into one piece of memory: one copy brings both to
    the host."""
    begin = len(x) * torch.int64.itemsize
    room = torch.empty(begin + len(x) * x.element_size(), dtype=torch.uint8, device=x.device)
    indices, values = room[:begin].view(torch.int64), room[begin:].view(x.dtype)
    torch.max(x, -1, out=(values, indices))
    return indices, values


@runtime_checkable
class DependentOps(Protocol):
    """Operators that support programmatic dependent launch."""

    dependent_launches: DependentLaunches


class Float32NormOps:
    """Wraps other operators for models whose norm weights are float32 and whose dtype is narrower.
    Norms are computed in float32, and the residual sum stays float32 from the first layer on."""

    def __init__(self, inner: Ops) -> None:
        self._inner = inner

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._inner.rms_norm(x.float(), weight, eps).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = self._inner.add_rms_norm(x.float(), residual.float(), weight, eps)
        return normed.to(x.dtype), total

    def rotate_qkv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        shape: HeadShape,
        norm: QKNorm | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if norm is None:
            return self._inner.rotate_qkv(qkv, cos, sin, shape, None)
        query, key, value = self._inner.rotate_qkv(qkv.float(), cos, sin, shape, norm)
        return query.to(qkv.dtype), key.to(qkv.dtype), value.to(qkv.dtype)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._inner.silu_mul(gate_up)

    def argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inner.argmax(x)


def row_stride(x: torch.Tensor) -> int | None:
    """Elements between rows of x [..., H]; None if rows are not dense or not evenly spaced."""
    if x.is_contiguous():
        return x.shape[-1]
    return x.stride(0) if x.ndim == 2 and x.stride(1) == 1 else None


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up of gate_up [T, 2 I], the gate first: [T, I]. Approximates GELU by tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """The activation of MLPs that have no gate."""
    return F.relu(x).square()


def soft_cap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Squashes x into (-cap, cap) by tanh; returns x itself if there is no cap."""
    return x if cap is None else torch.tanh(x / cap) * cap


def rotate_heads(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """Rotates heads x [T, H, D] as `rotate_qkv` does."""
    return _rotate_pairs(x, cos, sin) if interleaved else _rotate(x, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    width = cos.shape[-1]
    first, second, rest = x[..., :width], x[..., width : 2 * width], x[..., 2 * width :]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*rotated, rest), dim=-1).to(x.dtype)


def _rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    width = 2 * cos.shape[-1]
    rotated, rest = x[..., :width], x[..., width:]
    first, second = rotated[..., ::2], rotated[..., 1::2]
    pairs = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((torch.stack(pairs, dim=-1).flatten(-2), rest), dim=-1).to(x.dtype)
