"""Builds a model's shape, and its layers and inputs, as tensors without memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from headrace_engine.checkpoints.config import ExpertsConfig
from headrace_engine.core.attention_backend import AttentionMetadata, LayerParams
from headrace_engine.cuda_graphs.static_batch import DecodeInputs
from headrace_engine.device.transfer import Array
from headrace_engine.kernels.triton.dependent_launch import DependentLaunches
from headrace_engine.layers.expert_weights import ExpertWeights, GroupedWeight, MixtureParts
from headrace_engine.layers.feed_forward import GatedMLP, SharedExpert
from headrace_engine.layers.layers import PlainLinear
from headrace_engine.lora import tiles
from headrace_engine.lora.batch import LayerLoRA, LoRALimits
from headrace_engine.lora.experts import LoRAExperts
from headrace_engine.lora.shapes import mixture_shapes
from headrace_engine.operators import triton as triton_ops
from headrace_engine.operators.base import HeadShape, QKNorm
from headrace_engine.operators.qkv import QKVRows

from .meta import META, made
from .packed_weights import mxfp4_experts, quantized_experts
from .recurrent import RecurrentShape


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The part of a model's shape that kernels are compiled for. A step has `tokens` prompt tokens
    and `decodes` decode rows, with contexts of `context` keys. `latent` above 0: attention is over
    latents, whose first `latent` elements are the values. `recurrent` is the shape of
    recurrent layers."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    qk_norm: bool = False
    rotated: int | None = None
    interleaved: bool = False
    params: LayerParams = field(default=LayerParams(0.1))
    weight_bits: int = 16
    experts: ExpertsConfig | None = None
    tokens: int = 1024
    decodes: int = 1
    context: int = 1024
    latent: int = 0
    recurrent: RecurrentShape | None = None

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def decode_metadata(sequences: int, context: int) -> AttentionMetadata:
    return _metadata(sequences, sequences, 1, context, sequences)


def prefill_metadata(shape: ModelShape) -> AttentionMetadata:
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


def queries(shape: ModelShape, tokens: int) -> torch.Tensor:
    return made(tokens, shape.heads, shape.head_dim, dtype=shape.dtype)


def qkv_rows(shape: ModelShape, tokens: int) -> QKVRows:
    angles = made(tokens, (shape.rotated or shape.head_dim) // 2)
    head = made(shape.head_dim, dtype=shape.dtype)
    heads = HeadShape(shape.heads, shape.kv_heads, shape.head_dim, interleaved=shape.interleaved)
    qkv = made(tokens, shape.qkv_width, dtype=shape.dtype)
    return QKVRows(qkv, angles, angles, heads, QKNorm(head, head) if shape.qk_norm else None)


def decode_inputs(sequences: int) -> DecodeInputs:
    long, metadata = made(sequences, dtype=torch.int64), decode_metadata(sequences, 1024)
    return DecodeInputs(long, long, long, metadata.seq_lens, metadata.block_tables)


def lora_rows(
    rows: int, slots: int, dtype: torch.dtype, dependent_launches: DependentLaunches | None = None
) -> tiles.TiledRows:
    """The rows of a step in which sequences use the adapters in turn."""
    limits = LoRALimits(slots, rows, dtype.itemsize)
    products = tiles.TiledProducts(limits, _to_meta, dependent_launches=dependent_launches)
    return products.rows(np.arange(rows) % slots)


def _to_meta(arrays: Sequence[Array]) -> list[torch.Tensor]:
    return [torch.from_numpy(array).to(META) for array in arrays]


def expert_lora(shape: ModelShape, config: ExpertsConfig, tokens: int, rank: int) -> LayerLoRA:
    """Adapters of all experts of a layer."""
    experts = {
        name: LoRAExperts(one, 2, one.matrices * rank, shape.dtype, META)
        for name, one in mixture_shapes(shape.hidden, config).items()
        if one.experts
    }
    return LayerLoRA({}, lora_rows(tokens, 2, shape.dtype), experts)


def mixtures(shape: ModelShape, experts: ExpertsConfig) -> list[MixtureParts]:
    """Mixtures with each layout of scales that the weights' format allows."""
    groups = (None,) if shape.cache_dtype is None else (128, None)
    found = [_mixture(shape, experts, group) for group in groups]
    if shape.weight_bits < 16:
        quantized = quantized_experts(shape.hidden, experts, shape.weight_bits)
        found += [replace(found[0], weights=weights) for weights in quantized]
    if not experts.bias:
        return found
    found.append(replace(found[0], weights=mxfp4_experts(shape.hidden, experts)))
    upper, lower = (
        made(experts.count, outputs, dtype=shape.dtype)
        for outputs in (2 * experts.intermediate_size, shape.hidden)
    )
    return [replace(one, weights=one.weights.with_biases(upper, lower)) for one in found]


def _mixture(shape: ModelShape, experts: ExpertsConfig, group: int | None) -> MixtureParts:
    """A mixture.

    With an fp8 cache its weights are fp8, with a scale for each `group` inputs, or one for all
    inputs.
    """

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
        gate = PlainLinear(weight(1, hidden), None) if experts.shared_gate else None
        shared = SharedExpert(mlp, gate)
    weights = ExpertWeights(grouped(2 * inner, hidden), grouped(hidden, inner))
    router = PlainLinear(weight(experts.count, hidden), None)
    correction = made(experts.count) if experts.correction else None
    return MixtureParts(router, weights, shared, experts, correction=correction)
