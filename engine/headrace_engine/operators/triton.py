"""The decoder's element-wise operators through Triton kernels, for CUDA devices.

Plain torch computes what the kernels do not support (mixed dtypes, strided rows). Results overwrite
inputs only where the `Ops` protocol allows it.
"""

from dataclasses import dataclass

import torch

from ..kernels.triton.cache import rotate_kernel
from ..kernels.triton.dependent_launch import DependentLaunches
from ..kernels.triton.elementwise import rms_norm_kernel, silu_mul_kernel
from ..kernels.triton.launch import LoRALaunches, power_of_two, row_warps
from ..layers.expert_weights import MixtureParts
from ..layers.feed_forward import FeedForward
from ..layers.float8_weight import Float8Weight
from ..layers.fp8_cache import NOT_FP8, Storage
from ..layers.layers import Linear, make_linear
from ..layers.packed_weights import pack_quantized
from ..layers.quantized_weight import QuantizedWeight
from ..lora.batch import LoRALimits, LoRAProducts, Move
from ..lora.tiles import TiledProducts
from .base import HeadShape, QKNorm, TorchOps, row_stride
from .packed_linear import PackedProducts
from .qkv import QKVRows
from .triton_experts import GroupedMoe
from .triton_recurrent import TritonRecurrences
from .tuned_experts import Mixtures
from .tuned_float8 import Float8Products
from .tuned_linear import Products, takes

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Elements of a row that one program multiplies, and heads that one program rotates.
SILU_BLOCK, ROTATED_HEADS = 1024, 8


@dataclass(frozen=True, slots=True)
class StoreTarget:
    """Caches [blocks, Hkv, block_size, D], the slots of tokens in them, and the scales of stored
    values."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slots: torch.Tensor
    stored: Storage = NOT_FP8
    key_scale: float = 1.0
    value_scale: float = 1.0


class TritonOps:
    """Triton operators, and the layers they have made, for tuning: `products` are dense, `packed`
    have packed int4 or int8 weights, `mixtures` have experts. `lora_launches` are used by adapter
    products made later. `dependent_launches` has the options for programmatic dependent launch;
    `recurrences` makes the recurrent parts of layers."""

    def __init__(self) -> None:
        self._torch = TorchOps()
        self.dependent_launches = DependentLaunches()
        self.products = Products(self.dependent_launches)
        self.packed = PackedProducts(self.dependent_launches)
        self.float8 = Float8Products(self.dependent_launches)
        self.mixtures = Mixtures()
        self.lora_launches = LoRALaunches()
        self.recurrences = TritonRecurrences(self.dependent_launches)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        stride = row_stride(x)
        if stride is None or x.dtype is not weight.dtype or not _one_kind(weight) or not x.numel():
            return self._torch.rms_norm(x, weight, eps)
        output = x.new_empty(x.shape)
        self._launch_norm(output, x, None, weight, eps, stride)
        return output

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not _one_kind(x, weight, residual):
            return self._torch.add_rms_norm(x, residual, weight, eps)
        output = torch.empty_like(x)
        self._launch_norm(output, x, residual, weight, eps, x.shape[-1])
        return output, residual

    def _launch_norm(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        stride: int,
    ) -> None:
        width = x.shape[-1]
        rms_norm_kernel[(x.numel() // width,)](
            output, x, residual, weight, eps, stride,
            WIDTH=width, BLOCK=power_of_two(width), ADD=residual is not None,
            **self.dependent_launches.small, num_warps=row_warps(width),
        )  # fmt: skip

    def rotate_qkv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        shape: HeadShape,
        norm: QKNorm | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not can_rotate(qkv, cos, sin):
            return self._torch.rotate_qkv(qkv, cos, sin, shape, norm)
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        rotated = qkv.new_empty((len(qkv), heads + kv_heads, dim))
        _launch_rotation(
            rotated, QKVRows(qkv, cos, sin, shape, norm), None, self.dependent_launches
        )
        values = qkv[:, (heads + kv_heads) * dim :].view(len(qkv), kv_heads, dim)
        return rotated[:, :heads], rotated[:, heads:], values

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if not _one_kind(gate_up):
            return self._torch.silu_mul(gate_up)
        width = gate_up.shape[-1] // 2
        output = gate_up.new_empty((*gate_up.shape[:-1], width))
        rows = output.numel() // width
        block = min(SILU_BLOCK, power_of_two(width))
        silu_mul_kernel[(rows, -(-width // block))](
            output, gate_up, 2 * width,
            WIDTH=width, BLOCK=block, **self.dependent_launches.small, num_warps=4,
        )  # fmt: skip
        return output

    def argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._torch.argmax(x)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        if not takes(weight):
            return make_linear(weight, bias)
        return self.products.layer(weight, bias, self.silu_mul)

    def quantized_linear(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device
    ) -> Linear:
        return self.packed.layer(pack_quantized(weight, device), bias)

    def float8_linear(
        self, weight: Float8Weight, bias: torch.Tensor | None, device: torch.device
    ) -> Linear | None:
        if device.type != "cuda":
            return None
        capability = torch.cuda.get_device_capability(device)
        return self.float8.layer(weight, bias, device, capability)

    def mixture(self, parts: MixtureParts) -> FeedForward:
        return GroupedMoe(parts, mixtures=self.mixtures, dependent_launches=self.dependent_launches)

    def lora_products(self, limits: LoRALimits, move: Move) -> LoRAProducts:
        return TiledProducts(
            limits, move, dependent_launches=self.dependent_launches, measured=self.lora_launches
        )


def rotate_and_store(
    rows: QKVRows, target: StoreTarget, dependent_launches: DependentLaunches
) -> torch.Tensor:
    """Returns rotated queries [T, Hq, D]; writes rotated keys, and values, to their slots."""
    query = rows.qkv.new_empty((len(rows.qkv), rows.shape.num_heads, rows.shape.head_dim))
    _launch_rotation(query, rows, target, dependent_launches)
    return query


def can_rotate(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether the kernel supports these: dense rows, dense float32 tables."""
    tables = cos.dtype is sin.dtype is torch.float32 and cos.is_contiguous() and sin.is_contiguous()
    return tables and qkv.dtype in FLOATS and qkv.stride(-1) == 1 and qkv.numel() > 0


def _one_kind(*tensors: torch.Tensor) -> bool:
    """Whether all are dense, not empty and of one dtype that the kernels compute with."""
    dtype = tensors[0].dtype
    return dtype in FLOATS and all(
        one.dtype is dtype and one.is_contiguous() and one.numel() > 0 for one in tensors
    )


def _launch_rotation(
    output: torch.Tensor,
    rows: QKVRows,
    target: StoreTarget | None,
    dependent_launches: DependentLaunches,
) -> None:
    shape, norm, to = rows.shape, rows.norm, target
    caches = to.stored.views((to.key_cache, to.value_cache)) if to else (None, None)
    kv_chunks = -(-shape.num_kv_heads // ROTATED_HEADS)
    chunks = -(-shape.num_heads // ROTATED_HEADS) + (1 if to is None else 2) * kv_chunks
    rotate_kernel[(len(rows.qkv), chunks)](
        output, rows.qkv, rows.cos, rows.sin,
        norm.query if norm else None, norm.key if norm else None,
        *caches, to.slots if to else None,
        1.0 / to.key_scale if to else 1.0, 1.0 / to.value_scale if to else 1.0,
        shape.eps, rows.qkv.stride(0),
        NUM_HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, HEAD_DIM=shape.head_dim,
        WIDTH=rows.cos.shape[-1], BLOCK_SIZE=to.key_cache.shape[2] if to else 1,
        HEADS=ROTATED_HEADS, DIM=power_of_two(shape.head_dim), NORM=norm is not None,
        INTERLEAVED=shape.interleaved,
        STORE=to is not None, BITS=to.stored.as_bytes if to else False,
        LARGEST=to.stored.largest if to else 0.0, **dependent_launches.small, num_warps=4,
    )  # fmt: skip
