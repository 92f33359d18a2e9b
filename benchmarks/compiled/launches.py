"""Records the launches of the Triton backend and operators on tensors without memory: nothing is
compiled and no device is needed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch

from headrace_engine.attention import triton as attention
from headrace_engine.autotune.adapters import AdapterTuning
from headrace_engine.autotune.experts import MANY_TOKENS
from headrace_engine.checkpoints.config import ExpertsConfig
from headrace_engine.core.attention_backend import KVSpec
from headrace_engine.cuda_graphs.static_batch import stage_by_kernel
from headrace_engine.kernels.triton import launch as table
from headrace_engine.kernels.triton.dependent_launch import (
    DependentLaunch,
    DependentLaunches,
    StepLaunch,
)
from headrace_engine.kernels.triton.launch import EXPERT_ROWS, LORA_NARROW
from headrace_engine.layers import triton_float8
from headrace_engine.layers.float8_weight import Float8Weight
from headrace_engine.layers.fp8_cache import ADA
from headrace_engine.lora.linear import LoRALinear
from headrace_engine.lora.shapes import LinearShape, linear_shape
from headrace_engine.operators import batch_invariant, triton_experts, tuned_float8, tuned_linear
from headrace_engine.operators import triton as triton_ops
from headrace_engine.sampling.random_sampling import launch_sample_kernel

from .layers import (
    ModelShape,
    decode_inputs,
    decode_metadata,
    expert_lora,
    lora_rows,
    mixtures,
    prefill_metadata,
    qkv_rows,
    queries,
)
from .meta import META, made
from .packed_weights import multiply_packed, tune_packed
from .recording import KernelLaunch, record
from .recurrent import advance

VOCABULARY = 128_256


def model_launches(capability: int, shape: ModelShape) -> list[KernelLaunch]:
    """All kernels that steps of such a model launch on a device of this compute capability, such as
    90."""

    def run() -> None:
        (_attend_latents if shape.latent else _attend)(capability, shape)
        _operate(shape)
        _adapt(shape)
        if shape.cache_dtype is not None:
            _multiply_float8(divmod(capability, 10), shape)
        if shape.weight_bits < 16:
            multiply_packed((shape.qkv_width, shape.hidden), shape.weight_bits, shape.dtype)
        if shape.experts is not None:
            _mix(divmod(capability, 10), shape, shape.experts)
        if shape.recurrent is not None:
            for runs in ((1, 1), (1, shape.tokens)):
                advance(shape.recurrent, shape.dtype, runs)

    return record(run)


def candidate_launches(capability: int, shape: ModelShape) -> list[KernelLaunch]:
    """The launches that an engine may measure at warm-up on such a device; some may not fit it."""

    def run() -> None:
        _tune_attention(divmod(capability, 10), shape)
        if shape.dtype in tuned_linear.HALVES:
            for rows in table.ROW_BOUNDS:
                x = made(rows, shape.hidden, dtype=shape.dtype)
                _tune_products(triton_ops.TritonOps(), x, shape)
                if shape.dtype is torch.bfloat16:
                    _fuse_norms(triton_ops.TritonOps(), rows, shape)
            _tune_adapters(shape)
            if shape.weight_bits < 16:
                sizes = (shape.qkv_width, shape.hidden)
                tune_packed(sizes, shape.weight_bits, shape.dtype)
            if shape.cache_dtype is not None:
                for rows in table.ROW_BOUNDS:
                    _tune_float8(divmod(capability, 10), shape, rows)
        if shape.experts is not None:
            _tune_experts(divmod(capability, 10), shape, shape.experts)

    return record(run)


def dependent_launches(capability: int, shape: ModelShape) -> list[KernelLaunch]:
    """The kernels of steps that use programmatic dependent launch on Hopper or newer, in each
    variant."""
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
    backend.dependent_launches = ops.dependent_launches
    spec = KVSpec(shape.kv_heads, shape.head_dim, 16, shape.dtype, META, shape.cache_dtype)
    cache, decodes = backend.allocate(2, spec), decode_metadata(1, shape.context)
    with ops.dependent_launches.during(StepLaunch(way)):
        backend.forward_qkv(qkv_rows(shape, 1), cache, decodes, shape.params)
        _operate_with(ops, shape)
        if shape.dtype is torch.bfloat16:
            _fuse_norms(ops, 1, shape)
        down = linear_shape(shape.inner, {"down_proj": shape.hidden}, "mlp")
        _adapt_layer(down, 1, 16, shape.dtype, ops.dependent_launches)
        _tune_float8(device, shape, 1, ops.dependent_launches)
        if shape.weight_bits < 16:
            sizes = (shape.qkv_width, shape.hidden)
            multiply_packed(sizes, shape.weight_bits, shape.dtype, ops.dependent_launches)
        if shape.recurrent is not None:
            advance(shape.recurrent, shape.dtype, (1, 1), ops.dependent_launches)
        if shape.experts is not None:
            for parts in mixtures(shape, shape.experts):
                moe = triton_experts.GroupedMoe(
                    parts, capability=device, dependent_launches=ops.dependent_launches
                )
                for tokens in (1, 2 * triton_experts.TOKENS):
                    moe(made(tokens, shape.hidden, dtype=shape.dtype))
                if not shape.experts.bias:
                    moe(
                        made(1, shape.hidden, dtype=shape.dtype),
                        expert_lora(shape, shape.experts, 1, 16),
                    )


def _tune_attention(device: tuple[int, int], shape: ModelShape) -> None:
    backend = attention.TritonBackend(device)
    spec = KVSpec(shape.kv_heads, shape.head_dim, 16, shape.dtype, META, shape.cache_dtype)
    cache, params = backend.allocate(2, spec), shape.params
    for tile in table.prefill_candidates(
        backend.prefill_launch(shape.dtype.itemsize, shape.head_dim)
    ):
        backend.use(table.AttentionLaunches(prefill=tile))
        backend.attend(queries(shape, shape.tokens), cache, prefill_metadata(shape), params)
    for sequences in table.DECODE_BOUNDS:
        first = backend.decode_launch(shape.dtype.itemsize, shape.head_dim, sequences)
        parts, merges = table.part_candidates(first), table.merge_candidates(first)
        for one in (*parts, *merges, *table.tile_candidates(first)):
            backend.use(table.AttentionLaunches(decodes=((sequences, one),)))
            metadata = decode_metadata(sequences, shape.context)
            backend.attend(queries(shape, sequences), cache, metadata, params)


def _tune_experts(capability: tuple[int, int], shape: ModelShape, experts: ExpertsConfig) -> None:
    for parts in mixtures(shape, experts):
        moe = triton_experts.GroupedMoe(parts, capability=capability)
        for tokens in (*table.EXPERT_BOUNDS, MANY_TOKENS):
            x = made(tokens, shape.hidden, dtype=shape.dtype)
            for one in moe.candidates(x):
                moe.run(x, one)


def _tune_adapters(shape: ModelShape) -> None:
    """Launches adapters of ranks up to 16, in eight slots, on the layer with the most inputs."""
    linear = linear_shape(shape.inner, {"down_proj": shape.hidden}, "mlp")
    like = made(0, dtype=shape.dtype)
    rows, adapted = table.LORA_BOUNDS[-1], AdapterTuning(triton_ops.TritonOps(), (), 8, 16, like)
    for one in table.lora_candidates(table.lora_launch(shape.dtype.itemsize, rows)):
        x, y = (made(rows, size, dtype=shape.dtype) for size in (shape.inner, shape.hidden))
        adapted.tiled(rows, one).add(LoRALinear(linear, 8, 16, shape.dtype, META), x, y)


def _tune_products(ops: triton_ops.TritonOps, x: torch.Tensor, shape: ModelShape) -> None:
    qkv = ops.linear(made(shape.qkv_width, shape.hidden, dtype=shape.dtype), None)
    gates = ops.linear(made(2 * shape.inner, shape.hidden, dtype=shape.dtype), None)
    assert isinstance(qkv, tuned_linear.TunedLinear)
    assert isinstance(gates, tuned_linear.TunedLinear)
    for one in table.small_batch_candidates(shape.hidden, shape.qkv_width):
        qkv.small_batch(x, one)
    if len(x) == 1:
        for vector in table.vector_candidates(shape.hidden, shape.dtype.itemsize):
            qkv.small_batch(x, vector)
    for one in table.silu_candidates(shape.hidden, shape.inner):
        gates.small_batch_silu(x, one)


def _fuse_norms(ops: triton_ops.TritonOps, rows: int, shape: ModelShape) -> None:
    """Launches the products before and after a norm, with each allowed tile; the norm is split into
    as many parts as possible."""
    norm, residual = (made(*sizes, dtype=shape.dtype) for sizes in ((1,), (rows, shape.hidden)))
    parts = -(-shape.hidden // min(one.columns for one in table.SMALL_BATCH_TILES))
    normed = tuned_linear.DeferredNormRows(residual, made(rows, parts), 1e-6)
    for layer in _chosen(ops, rows, shape.hidden, shape.inner):
        layer.linear_add_norm(made(rows, shape.inner, dtype=shape.dtype), residual, norm, 1e-6)
    for layer in _chosen(ops, rows, shape.qkv_width, shape.hidden):
        layer.norm_linear(normed)
    for layer in _chosen(ops, rows, 2 * shape.inner, shape.hidden, gated=True):
        layer.norm_linear_silu(normed)


def _chosen(
    ops: triton_ops.TritonOps, rows: int, outputs: int, inputs: int, gated: bool = False
) -> Iterator[tuned_linear.TunedLinear]:
    """Yields a layer once for each launch, with that launch chosen."""
    layer = ops.linear(made(outputs, inputs, dtype=torch.bfloat16), None)
    assert isinstance(layer, tuned_linear.TunedLinear)
    tuned = ops.products.shapes[tuned_linear.ProductShape(outputs, inputs, torch.bfloat16)]
    plain, silu = (
        table.small_batch_candidates(inputs, outputs),
        table.silu_candidates(inputs, outputs // 2),
    )
    for one in silu if gated else plain:
        (tuned.silu if gated else tuned.chosen)[table.ROW_BOUNDS.index(rows)] = one
        yield layer


def _attend(capability: int, shape: ModelShape) -> None:
    device = divmod(capability, 10)
    backend = attention.TritonBackend(device)
    deterministic = attention.TritonBackend(device, deterministic=True)
    spec = KVSpec(shape.kv_heads, shape.head_dim, 16, shape.dtype, META, shape.cache_dtype)
    cache = backend.allocate(2, spec)
    decodes, prefill = decode_metadata(shape.decodes, shape.context), prefill_metadata(shape)
    backend.forward_qkv(qkv_rows(shape, shape.decodes), cache, decodes, shape.params)
    short = decode_metadata(shape.decodes, 16)
    backend.forward_qkv(qkv_rows(shape, shape.decodes), cache, short, shape.params)
    backend.forward_qkv(qkv_rows(shape, shape.tokens), cache, prefill, shape.params)
    deterministic.forward_qkv(qkv_rows(shape, shape.tokens), cache, prefill, shape.params)
    query, key = (
        made(shape.tokens, heads, shape.head_dim, dtype=shape.dtype)
        for heads in (shape.heads, shape.kv_heads)
    )
    backend.forward(query, key, key, cache, prefill, shape.params)


def _attend_latents(capability: int, shape: ModelShape) -> None:
    """Runs decodes whose keys are split into parts, and a prompt."""
    backend = attention.TritonBackend(divmod(capability, 10))
    width = shape.head_dim
    spec = KVSpec(1, width, 16, shape.dtype, META, shape.cache_dtype, shape.latent)
    cache = backend.allocate(2, spec)
    for tokens, metadata in (
        (shape.decodes, decode_metadata(shape.decodes, shape.context)),
        (shape.tokens, prefill_metadata(shape)),
    ):
        query = made(tokens, shape.heads, width, dtype=shape.dtype)
        latents = made(tokens, width, dtype=shape.dtype)
        backend.forward_latent(query, latents, cache, metadata, shape.params, shape.latent)


def _operate(shape: ModelShape) -> None:
    _operate_with(triton_ops.TritonOps(), shape)
    stage_by_kernel(decode_inputs(1), decode_inputs(2), 2)
    launch_sample_kernel(made(2, VOCABULARY), made(3, 2), made(2, dtype=torch.float64))
    linear = made(shape.qkv_width, shape.hidden, dtype=shape.dtype)
    batch_invariant.BatchInvariantLinear(linear, None)(made(2, shape.hidden, dtype=shape.dtype))


def _operate_with(ops: triton_ops.TritonOps, shape: ModelShape) -> None:
    if shape.dtype in tuned_linear.HALVES:
        _tune_products(ops, made(1, shape.hidden, dtype=shape.dtype), shape)
    hidden, other = (made(2, shape.hidden, dtype=shape.dtype) for _ in range(2))
    weight = made(shape.hidden, dtype=shape.dtype)
    ops.rms_norm(hidden, weight, 1e-6)
    ops.rms_norm(made(2, shape.qkv_width, dtype=shape.dtype)[:, : shape.hidden], weight, 1e-6)
    ops.add_rms_norm(hidden, other, weight, 1e-6)
    ops.silu_mul(made(2, 2 * shape.inner, dtype=shape.dtype))
    rows = qkv_rows(shape, 2)
    ops.rotate_qkv(rows.qkv, rows.cos, rows.sin, rows.shape, rows.norm)


def _multiply_float8(capability: tuple[int, int], shape: ModelShape) -> None:
    """Multiplies fp8 weights with a scale for each 128 inputs, next to an fp8 cache; rows are
    rounded on devices with instructions for it."""
    hidden = made(shape.tokens, shape.hidden, dtype=shape.dtype)
    values = made(shape.qkv_width, shape.hidden, dtype=torch.float8_e4m3fn)
    weight = Float8Weight(values, made(shape.qkv_width, shape.hidden // 128), 128)
    layer = triton_float8.WeightOnlyFloat8Linear(weight, None, META, capability)
    layer(hidden)
    layer(hidden[: shape.decodes])
    if capability >= ADA:
        triton_float8.round_rows(hidden)
    _tune_float8(capability, shape, shape.decodes)


def _tune_float8(
    capability: tuple[int, int],
    shape: ModelShape,
    rows: int,
    dependent_launches: DependentLaunches | None = None,
) -> None:
    """Tunes weights with a scale for each 128 inputs, and with one scale; the latter are not
    split."""
    if shape.hidden % 128:
        return
    x = made(rows, shape.hidden, dtype=shape.dtype)
    values = made(shape.qkv_width, shape.hidden, dtype=torch.float8_e4m3fn)
    for group in (128, shape.hidden):
        scales = made(shape.qkv_width, shape.hidden // group)
        products = tuned_float8.Float8Products(dependent_launches)
        layer = products.layer(Float8Weight(values, scales, group), None, META, capability)
        assert isinstance(layer, tuned_float8.Float8Linear)
        for tuned in products.shapes:
            for one in tuned.candidates:
                layer.small_batch(x, one)
            for vector in tuned.vector_candidates if rows == 1 else ():
                layer.small_batch(x, vector)


def _mix(capability: tuple[int, int], shape: ModelShape, experts: ExpertsConfig) -> None:
    """Runs a mixture on one token, and on as many tokens as fill the tiles of each size; also on a
    rank that has half of the experts."""
    sizes = [average * experts.count // experts.per_token for average in EXPERT_ROWS]
    half = replace(experts, local_range=(experts.count // 2, experts.count))
    found = mixtures(shape, experts)
    for parts in (*found, replace(found[0], config=half)):
        for deterministic in (False, True):
            moe = triton_experts.GroupedMoe(
                parts, capability=capability, deterministic=deterministic
            )
            for tokens in (1, *sizes):
                slots = made(tokens, dtype=torch.int64)
                moe(made(tokens, shape.hidden, dtype=shape.dtype), None, slots)
            if not deterministic and not experts.bias:
                _adapt_experts(moe, sizes, shape, experts)


def _adapt_experts(
    moe: triton_experts.GroupedMoe, sizes: Sequence[int], shape: ModelShape, config: ExpertsConfig
) -> None:
    """Applies adapters of ranks up to 16 and up to 64 to experts."""
    for tokens, rank in product((1, *sizes), (16, 64)):
        lora = expert_lora(shape, config, tokens, rank)
        moe(made(tokens, shape.hidden, dtype=shape.dtype), lora)


def _adapt(shape: ModelShape) -> None:
    """Applies adapters of ranks up to 16 and up to 64, to the layer with most parts and to the one
    with most inputs, for few rows and for many."""
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
    dependent_launches: DependentLaunches | None = None,
) -> None:
    linear = LoRALinear(shape, 2, rank, dtype, META)
    x, y = made(rows, shape.inputs, dtype=dtype), made(rows, shape.outputs, dtype=dtype)
    lora_rows(rows, 2, dtype, dependent_launches).add(linear, x, y)
