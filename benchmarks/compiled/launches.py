"""What the Triton backend and operators launch, recorded on tensors without memory.

Torch's meta tensors raise if the host asks for their numbers, so a launch that needs one fails
here. Nothing is compiled and no device is needed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from headrace_engine.attention import triton as attention
from headrace_engine.attention.base import AttentionMetadata, KVSpec, LayerParams
from headrace_engine.attention.fp8 import ADA
from headrace_engine.drawing import launch_draw
from headrace_engine.lora import expert_tiles, tiles
from headrace_engine.lora.batch import LayerLoRA, LoRALimits
from headrace_engine.lora.experts import JOINED, LoRAExperts
from headrace_engine.lora.linear import LoRALinear
from headrace_engine.lora.shapes import LinearShape, linear_shape, mixture_shapes
from headrace_engine.model import (
    invariant,
    levels_experts,
    levels_linear,
    triton_experts,
    triton_float8,
    triton_ops,
    tuned_float8,
    tuned_linear,
)
from headrace_engine.model.config import ExpertsConfig
from headrace_engine.model.expert_weights import ExpertWeights, GroupedWeight, MixtureParts
from headrace_engine.model.feed_forward import GatedMLP, SharedExpert
from headrace_engine.model.layers import PlainLinear
from headrace_engine.model.ops import HeadShape, QKNorm
from headrace_engine.model.qkv import QKVRows
from headrace_engine.model.quantization.float8_weight import Float8Weight
from headrace_engine.model.static_batch import DecodeInputs, stage_by_kernel
from headrace_engine.transfer import Array
from headrace_engine.triton_kernels import launch as table
from headrace_engine.triton_kernels import sampling, staging
from headrace_engine.triton_kernels.dependent import DependentLaunch, DependentLaunches
from headrace_engine.triton_kernels.launch import EXPERT_ROWS, LORA_NARROW
from headrace_engine.tuning.adapters import AdapterTuning
from headrace_engine.tuning.experts import MANY_TOKENS

from .levels import level_experts, multiply_levels, tune_levels

META = torch.device("meta")
VOCABULARY = 128_256
OPTIONS = ("num_warps", "num_stages", "launch_pdl")


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
    weight_bits: int = 16
    experts: ExpertsConfig | None = None
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
    for module in (
        *(attention, invariant, triton_experts, triton_float8, triton_ops, staging, tiles),
        *(expert_tiles, tuned_float8, levels_linear, levels_experts),
        *(tuned_linear, sampling),
    ):
        for name in vars(module):
            if name.endswith("_kernel"):
                yield module, name


def model_launches(capability: int, shape: ModelShape) -> list[KernelLaunch]:
    """Every kernel that steps of such a model launch on a device of this capability, as 90."""

    def run() -> None:
        _attend(capability, shape)
        _operate(shape)
        _adapt(shape)
        if shape.cache_dtype is not None:
            _multiply_float8(divmod(capability, 10), shape)
        if shape.weight_bits < 16:
            multiply_levels((shape.qkv_width, shape.hidden), shape.weight_bits, shape.dtype)
        if shape.experts is not None:
            _mix(divmod(capability, 10), shape, shape.experts)

    return record(run)


def candidate_launches(capability: int, shape: ModelShape) -> list[KernelLaunch]:
    """What an engine that warms up on such a device may measure: some of it may not fit there."""

    def run() -> None:
        _tune_attention(divmod(capability, 10), shape)
        if shape.dtype in tuned_linear.HALVES:
            for rows in table.ROW_BOUNDS:
                x = made(rows, shape.hidden, dtype=shape.dtype)
                _tune_products(triton_ops.TritonOps(), x, shape)
            _tune_adapters(shape)
            if shape.weight_bits < 16:
                sizes = (shape.qkv_width, shape.hidden)
                tune_levels(sizes, shape.weight_bits, shape.dtype)
            if shape.cache_dtype is not None:
                for rows in table.ROW_BOUNDS:
                    _tune_float8(divmod(capability, 10), shape, rows)
        if shape.experts is not None:
            _tune_experts(divmod(capability, 10), shape, shape.experts)

    return record(run)


def dependent_launches(capability: int, shape: ModelShape) -> list[KernelLaunch]:
    """The kernels of steps that are launched before their turn, on Hopper or newer, in each way."""
    ahead = 8 << 20
    ways = (
        DependentLaunch(ahead, early=True, lines=True),
        DependentLaunch(ahead),
    )

    def run() -> None:
        for way in ways:
            _depend(divmod(capability, 10), shape, way)

    return [launch for launch in record(run) if "launch_pdl" in launch.options]


def _depend(device: tuple[int, int], shape: ModelShape, way: DependentLaunch) -> None:
    ops, backend = triton_ops.TritonOps(), attention.TritonBackend(device)
    backend.dependent = ops.dependent
    spec = KVSpec(shape.kv_heads, shape.head_dim, 16, shape.dtype, META, shape.cache_dtype)
    cache, decodes = backend.allocate(2, spec), decode_metadata(1, shape.context)
    with ops.dependent.during(way):
        backend.forward_qkv(_rows(shape, 1), cache, decodes, shape.params)
        _operate_with(ops, shape)
        down = linear_shape(shape.inner, {"down_proj": shape.hidden}, "mlp")
        _adapt_layer(down, 1, 16, shape.dtype, ops.dependent)
        _tune_float8(device, shape, 1, ops.dependent)
        if shape.weight_bits < 16:
            sizes = (shape.qkv_width, shape.hidden)
            multiply_levels(sizes, shape.weight_bits, shape.dtype, ops.dependent)
        if shape.experts is not None:
            for parts in _mixtures(shape, shape.experts):
                moe = triton_experts.GroupedMoe(parts, capability=device, dependent=ops.dependent)
                for tokens in (1, 2 * triton_experts.TOKENS):
                    moe(made(tokens, shape.hidden, dtype=shape.dtype))
                moe(
                    made(1, shape.hidden, dtype=shape.dtype),
                    _expert_lora(shape, shape.experts, 1, 16),
                )


def _tune_attention(device: tuple[int, int], shape: ModelShape) -> None:
    backend = attention.TritonBackend(device)
    spec = KVSpec(shape.kv_heads, shape.head_dim, 16, shape.dtype, META, shape.cache_dtype)
    cache, params = backend.allocate(2, spec), shape.params
    for tile in table.prefill_candidates(
        backend.prefill_launch(shape.dtype.itemsize, shape.head_dim)
    ):
        backend.use(table.AttentionLaunches(prefill=tile))
        backend.attend(_queries(shape, shape.tokens), cache, _prefill_metadata(shape), params)
    for sequences in table.DECODE_BOUNDS:
        first = backend.decode_launch(shape.dtype.itemsize, shape.head_dim, sequences)
        for one in (*table.part_candidates(first), *table.tile_candidates(first)):
            backend.use(table.AttentionLaunches(decodes=((sequences, one),)))
            metadata = decode_metadata(sequences, shape.context)
            backend.attend(_queries(shape, sequences), cache, metadata, params)


def _tune_experts(capability: tuple[int, int], shape: ModelShape, experts: ExpertsConfig) -> None:
    for parts in _mixtures(shape, experts):
        moe = triton_experts.GroupedMoe(parts, capability=capability)
        for tokens in (*table.EXPERT_BOUNDS, MANY_TOKENS):
            x = made(tokens, shape.hidden, dtype=shape.dtype)
            for one in moe.candidates(x):
                moe.run(x, one)


def _tune_adapters(shape: ModelShape) -> None:
    """Of ranks up to 16 in eight slots, on the layer of most inputs."""
    linear = linear_shape(shape.inner, {"down_proj": shape.hidden}, "mlp")
    like = made(0, dtype=shape.dtype)
    rows, adapted = table.LORA_BOUNDS[-1], AdapterTuning(triton_ops.TritonOps(), (), 8, 16, like)
    for one in table.lora_candidates(table.lora_launch(shape.dtype.itemsize, rows)):
        x, y = (made(rows, size, dtype=shape.dtype) for size in (shape.inner, shape.hidden))
        adapted.tiled(rows, one).add(LoRALinear(linear, 8, 16, shape.dtype, META), x, y)


def _queries(shape: ModelShape, tokens: int) -> torch.Tensor:
    return made(tokens, shape.heads, shape.head_dim, dtype=shape.dtype)


def _tune_products(ops: triton_ops.TritonOps, x: torch.Tensor, shape: ModelShape) -> None:
    qkv = ops.linear(made(shape.qkv_width, shape.hidden, dtype=shape.dtype), None)
    gates = ops.linear(made(2 * shape.inner, shape.hidden, dtype=shape.dtype), None)
    assert isinstance(qkv, tuned_linear.TunedLinear)
    assert isinstance(gates, tuned_linear.TunedLinear)
    for one in table.skinny_candidates(shape.hidden, shape.qkv_width):
        qkv.skinny(x, one)
    for one in table.silu_candidates(shape.hidden, shape.inner):
        gates.skinny_silu(x, one)


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
    _operate_with(triton_ops.TritonOps(), shape)
    stage_by_kernel(_inputs(1), _inputs(2), 2)
    launch_draw(made(2, VOCABULARY), made(3, 2), made(2, dtype=torch.float64))
    linear = made(shape.qkv_width, shape.hidden, dtype=shape.dtype)
    invariant.InvariantLinear(linear, None)(made(2, shape.hidden, dtype=shape.dtype))


def _operate_with(ops: triton_ops.TritonOps, shape: ModelShape) -> None:
    if shape.dtype in tuned_linear.HALVES:
        _tune_products(ops, made(1, shape.hidden, dtype=shape.dtype), shape)
    hidden, other = (made(2, shape.hidden, dtype=shape.dtype) for _ in range(2))
    weight = made(shape.hidden, dtype=shape.dtype)
    ops.rms_norm(hidden, weight, 1e-6)
    ops.add_rms_norm(hidden, other, weight, 1e-6)
    ops.silu_mul(made(2, 2 * shape.inner, dtype=shape.dtype))
    rows = _rows(shape, 2)
    ops.rotate_qkv(rows.qkv, rows.cos, rows.sin, rows.shape, rows.norm)


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
    _tune_float8(capability, shape, shape.decodes)


def _tune_float8(
    capability: tuple[int, int],
    shape: ModelShape,
    rows: int,
    dependent: DependentLaunches | None = None,
) -> None:
    """A scale for each 128 inputs, and for all."""
    x = made(rows, shape.hidden, dtype=shape.dtype)
    values = made(shape.qkv_width, shape.hidden, dtype=torch.float8_e4m3fn)
    for group in (128, shape.hidden):
        scales = made(shape.qkv_width, shape.hidden // group)
        products = tuned_float8.Float8Products(dependent)
        layer = products.layer(Float8Weight(values, scales, group), None, META, capability)
        assert isinstance(layer, tuned_float8.Float8Linear)
        for tuned in products.shapes:
            for one in tuned.candidates:
                layer.few(x, one)


def _mix(capability: tuple[int, int], shape: ModelShape, experts: ExpertsConfig) -> None:
    """One token, and as many as fill the tiles of each size."""
    sizes = [average * experts.count // experts.per_token for average in EXPERT_ROWS]
    for parts in _mixtures(shape, experts):
        for deterministic in (False, True):
            moe = triton_experts.GroupedMoe(
                parts, capability=capability, deterministic=deterministic
            )
            for tokens in (1, *sizes):
                slots = made(tokens, dtype=torch.int64)
                moe(made(tokens, shape.hidden, dtype=shape.dtype), None, slots)
            if not deterministic:
                _adapt_experts(moe, sizes, shape, experts)


def _adapt_experts(
    moe: triton_experts.GroupedMoe, sizes: Sequence[int], shape: ModelShape, config: ExpertsConfig
) -> None:
    """Adapters of ranks up to 16 and 64."""
    for tokens, rank in product((1, *sizes), (16, 64)):
        lora = _expert_lora(shape, config, tokens, rank)
        moe(made(tokens, shape.hidden, dtype=shape.dtype), lora)


def _expert_lora(shape: ModelShape, config: ExpertsConfig, tokens: int, rank: int) -> LayerLoRA:
    """Of all experts."""
    ranks = {"experts_gate_up": JOINED * rank, "experts_down": rank}
    experts = {
        name: LoRAExperts(one, 2, ranks[name], shape.dtype, META)
        for name, one in mixture_shapes(shape.hidden, config).items()
        if one.experts
    }
    return LayerLoRA({}, lora_rows(tokens, 2, shape.dtype), experts)


def _mixtures(shape: ModelShape, experts: ExpertsConfig) -> list[MixtureParts]:
    """In all layouts of scales that there are for what weights are kept in."""
    groups = (None,) if shape.cache_dtype is None else (128, None)
    found = [_mixture(shape, experts, group) for group in groups]
    if shape.weight_bits < 16:
        levels = level_experts(shape.hidden, experts, shape.weight_bits)
        found += [replace(found[0], weights=weights) for weights in levels]
    return found


def _mixture(shape: ModelShape, experts: ExpertsConfig, group: int | None) -> MixtureParts:
    """In fp8 beside such a cache, a scale for each group of inputs, or for all of an output."""

    def weight(*sizes: int) -> torch.Tensor:
        return made(*sizes, dtype=shape.dtype)

    def grouped(outputs: int, inputs: int) -> GroupedWeight:
        if shape.cache_dtype is None:
            return GroupedWeight(weight(experts.count, outputs, inputs))
        values = made(experts.count, outputs, inputs, dtype=torch.float8_e4m3fn)
        scales = made(experts.count, outputs, inputs // (group or inputs))
        return GroupedWeight(values, scales, group or inputs)

    hidden, inner, shared = shape.hidden, experts.intermediate_size, None
    if experts.shared_size is not None:
        up = PlainLinear(weight(2 * experts.shared_size, hidden), None)
        down = PlainLinear(weight(hidden, experts.shared_size), None)
        mlp = GatedMLP(up, down, triton_ops.TritonOps().silu_mul)
        shared = SharedExpert(mlp, PlainLinear(weight(1, hidden), None))
    weights = ExpertWeights(grouped(2 * inner, hidden), grouped(hidden, inner))
    router = PlainLinear(weight(experts.count, hidden), None)
    return MixtureParts(router, weights, shared, experts)


def _adapt(shape: ModelShape) -> None:
    """Adapters of ranks up to 16 and 64 on the layer of most parts and on that of most inputs, for
    few rows and for many."""
    heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for linear in (
        linear_shape(shape.hidden, {"q_proj": heads, "k_proj": kv, "v_proj": kv}, "self_attn"),
        linear_shape(shape.inner, {"down_proj": shape.hidden}, "mlp"),
    ):
        for rows, rank in product((LORA_NARROW, LORA_NARROW + 1), (16, 64)):
            _adapt_layer(linear, rows, rank, shape.dtype)


def _adapt_layer(
    shape: LinearShape,
    rows: int,
    rank: int,
    dtype: torch.dtype,
    dependent: DependentLaunches | None = None,
) -> None:
    linear = LoRALinear(shape, 2, rank, dtype, META)
    x, y = made(rows, shape.inputs, dtype=dtype), made(rows, shape.outputs, dtype=dtype)
    lora_rows(rows, 2, dtype, dependent).add(linear, x, y)


def lora_rows(
    rows: int, slots: int, dtype: torch.dtype, dependent: DependentLaunches | None = None
) -> tiles.TiledRows:
    """Rows with adapters by turns, in a step of just so many."""
    limits = LoRALimits(slots, rows, dtype.itemsize)
    products = tiles.TiledProducts(limits, _to_meta, dependent=dependent)
    return products.rows(np.arange(rows) % slots)


def _to_meta(arrays: Sequence[Array]) -> list[torch.Tensor]:
    return [torch.from_numpy(array).to(META) for array in arrays]


def _inputs(sequences: int) -> DecodeInputs:
    long, metadata = made(sequences, dtype=torch.int64), decode_metadata(sequences, 1024)
    return DecodeInputs(long, long, long, metadata.seq_lens, metadata.block_tables)


def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)
