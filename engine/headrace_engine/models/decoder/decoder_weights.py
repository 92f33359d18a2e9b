"""A decoder's weights, layer by layer, from a checkpoint or any other source of tensors.

Computes nothing; tensors have Llama's names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ...checkpoints.config import (
    ClampedSwiGLU,
    ExpertsConfig,
    IndexConfig,
    LatentConfig,
    ModelConfig,
)
from ...core.attention_backend import LayerParams
from ...layers.expert_weights import ExpertWeights, MixtureOps, MixtureParts, Names
from ...layers.feed_forward import (
    FeedForward,
    GatedActivation,
    GatedMLP,
    SharedExpert,
    SparseMoe,
    clamped_swiglu,
)
from ...layers.layers import ActivatedLinear, Linear
from ...operators.base import Ops, QKNorm, gelu_tanh_mul
from ..linear.linear_maker import LinearMaker
from ..weights.weights import WeightReader
from .decoder_tensors import (
    SHORTCUT,
    NormNames,
    expected_tensors,
    first_product,
    ignored_tensors,
)
from .latent import IndexWeights, LatentWeights, divide_heads


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights. `input_norm` and `mlp_norm` come after the residual sums, None for OLMo;
    `attention_output_norm` and `mlp_output_norm` before them (Gemma, OLMo). `wide_qk_norm` has the
    weights of all heads together; `rotated_qk_norm` comes after the rotation. With `latent` `qkv`
    makes (queries or what they are made from, latent, rotated key). `shortcut` reads what `mlp`
    reads; its result is added to that of the next layer."""

    input_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    attention_output_norm: torch.Tensor | None
    mlp_output_norm: torch.Tensor | None
    qkv: Linear
    qk_norm: QKNorm | None
    wide_qk_norm: QKNorm | None
    o: Linear
    mlp: FeedForward
    params: LayerParams
    rotated_qk_norm: QKNorm | None = None
    latent: LatentWeights | None = None
    shortcut: FeedForward | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights; `norm` comes before `lm_head`."""

    embedding: torch.Tensor
    layers: Sequence[DecoderLayer]
    norm: torch.Tensor
    lm_head: Linear


def read_weights(
    config: ModelConfig, reader: WeightReader, ops: Ops, quantize: bool = False
) -> DecoderWeights:
    """Reads a checkpoint's weights and lays them out for `ops`; `quantize` keeps linear layers in 8
    bits, if `ops` support it. Raises CheckpointError."""
    reader.check(expected_tensors(config), ignored=ignored_tensors(config))
    linears = LinearMaker(reader, ops, quantize)
    return make_weights(config, reader, linears, ops)


class TensorSource(Protocol):
    """Reads tensors by Llama's names."""

    def read(self, name: str) -> torch.Tensor: ...

    def read_float32(self, name: str) -> torch.Tensor: ...


class LinearSource(Protocol):
    """Makes layers by the names of the matrices that are stacked in them."""

    def make(
        self, weights: tuple[str, ...], biases: tuple[str, ...] = (), exact: bool = False
    ) -> Linear: ...

    def experts(self, experts: Sequence[tuple[Names, Names]]) -> ExpertWeights | None:
        """Stacks a mixture's matrices, given each expert's names of (gate and up, down); None if
        they cannot be stacked."""


def make_weights(
    config: ModelConfig, reader: TensorSource, linears: LinearSource, ops: Ops
) -> DecoderWeights:
    """Makes the decoder's layers from any source of tensors and linear layers."""
    source = _LayerReader(config, reader, linears, ops)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return DecoderWeights(
        embedding=reader.read("model.embed_tokens.weight"),
        layers=[source.layer(index) for index in range(config.num_layers)],
        norm=source.norm("model.norm.weight"),
        lm_head=linears.make((head,)),
    )


class LayerSource(Protocol):
    """Makes single layers and norms."""

    def layer(self, index: int) -> DecoderLayer: ...

    def norm(self, name: str) -> torch.Tensor: ...


def make_layer_reader(
    config: ModelConfig, reader: TensorSource, linears: LinearSource, ops: Ops
) -> LayerSource:
    """Makes the layers of a decoder one by one."""
    return _LayerReader(config, reader, linears, ops)


class _LayerReader:
    """Makes layers from a checkpoint's tensors."""

    def __init__(
        self, config: ModelConfig, reader: TensorSource, linears: LinearSource, ops: Ops
    ) -> None:
        self._config, self._reader, self._linears = config, reader, linears
        self._ops = ops
        silu = config.activation == "silu"
        self._activation: GatedActivation = ops.silu_mul if silu else gelu_tanh_mul

    def layer(self, index: int) -> DecoderLayer:
        config, prefix = self._config, f"model.layers.{index}."
        attention = f"{prefix}self_attn."
        norms = NormNames.of(config)
        qk_norm = self._qk_norm(attention) if config.qk_norm else None
        input_norm = self._norm_of(prefix, norms.before_attention)
        if config.has_unit_qk_norm(index) and input_norm is not None:
            ones = input_norm.new_ones(config.head_dim)
            qk_norm = QKNorm(ones, ones)
        return DecoderLayer(
            input_norm=input_norm,
            mlp_norm=self._norm_of(prefix, norms.before_mlp),
            attention_output_norm=self._norm_of(prefix, norms.after_attention),
            mlp_output_norm=self._norm_of(prefix, norms.after_mlp),
            qkv=self._linear(attention, first_product(config), config.qkv_bias),
            latent=None if config.latent is None else self._latent(attention, config.latent, index),
            qk_norm=None if config.wide_qk_norm or config.rotated_qk_norm else qk_norm,
            wide_qk_norm=qk_norm if config.wide_qk_norm else None,
            rotated_qk_norm=qk_norm if config.rotated_qk_norm else None,
            o=self._linear(attention, ("o_proj",), config.o_bias),
            mlp=self._feed_forward(f"{prefix}mlp.", index),
            shortcut=self._mixture(f"{prefix}{SHORTCUT}.", config.experts)
            if config.has_shortcut(index) and config.experts is not None
            else None,
            params=LayerParams(
                scale=config.scale,
                softcap=config.attention_softcap,
                sliding_window=None if config.chunked else config.windows[index],
                chunk=config.windows[index] if config.chunked else None,
                key_scale=config.kv_scale(index)[0],
                value_scale=config.kv_scale(index)[1],
                sinks=self._reader.read(f"{attention}sinks").float()
                if config.has_sinks(index)
                else None,
            ),
        )

    def norm(self, name: str) -> torch.Tensor:
        """A norm's weights; offset norms add 1 to them in float32."""
        weight = self._reader.read(name)
        return weight.float() + 1.0 if self._config.offset_norms else weight

    def _norm_of(self, prefix: str, name: str | None) -> torch.Tensor | None:
        return None if name is None else self.norm(prefix + name)

    def _qk_norm(self, prefix: str) -> QKNorm:
        return QKNorm(
            query=self.norm(f"{prefix}q_norm.weight"), key=self.norm(f"{prefix}k_norm.weight")
        )

    def _latent(self, prefix: str, latent: LatentConfig, layer: int) -> LatentWeights:
        keys, values = divide_heads(latent, self._reader.read(f"{prefix}kv_b_proj.weight"))
        has_query, index = latent.query_rank is not None, self._config.index_of(layer)
        return LatentWeights(
            config=latent,
            query=self._linear(prefix, ("q_b_proj",), False) if has_query else None,
            query_norm=self.norm(f"{prefix}q_a_layernorm.weight") if has_query else None,
            norm=self.norm(f"{prefix}kv_a_layernorm.weight") * latent.factor,
            keys=keys.contiguous(),
            values=values.transpose(1, 2).contiguous(),
            index=None if index is None else self._index(f"{prefix}indexer.", index),
        )

    def _index(self, prefix: str, index: IndexConfig) -> IndexWeights:
        factor = index.heads**-0.5 * index.width**-0.5
        return IndexWeights(
            config=index,
            query=self._linear(prefix, ("wq_b",), False),
            key=self._linear(prefix, ("wk",), False),
            norm=self._reader.read(f"{prefix}k_norm.weight"),
            norm_bias=self._reader.read(f"{prefix}k_norm.bias"),
            heads=self._reader.read_float32(f"{prefix}weights_proj.weight") * factor,
        )

    def _feed_forward(self, prefix: str, index: int) -> FeedForward:
        experts = self._config.experts
        if experts is None or not experts.sparse[index]:
            return self._mlp(prefix, self._config.mlp_bias)
        return self._mixture(prefix, experts)

    def _mixture(self, prefix: str, experts: ExpertsConfig) -> FeedForward:
        router = self._linear(prefix, ("gate",), experts.bias, exact=True)
        correction = self._correction(prefix) if experts.correction else None
        grouped = self._grouped(prefix, router, experts, correction)
        if grouped is not None:
            return grouped
        return SparseMoe(
            router=router,
            experts=[
                self._mlp(f"{prefix}experts.{one}.", experts.bias, experts.swiglu)
                for one in experts.local
            ],
            shared=self._shared(prefix, experts),
            config=experts,
            correction=correction,
        )

    def _correction(self, prefix: str) -> torch.Tensor:
        return self._reader.read_float32(f"{prefix}gate.e_score_correction_bias").flatten()

    def _grouped(
        self,
        prefix: str,
        router: Linear,
        experts: ExpertsConfig,
        correction: torch.Tensor | None,
    ) -> FeedForward | None:
        """The experts as one mixture, if the operators support grouped products of such weights."""
        ops, found = self._ops, [f"{prefix}experts.{one}." for one in experts.local]
        if not isinstance(ops, MixtureOps) or experts.zero:
            return None
        weights = self._linears.experts(
            [(_names(one, "gate_proj", "up_proj"), _names(one, "down_proj")) for one in found]
        )
        if weights is None:
            return None
        if experts.bias:
            weights = weights.with_biases(
                self._biases(found, "gate_proj", "up_proj"), self._biases(found, "down_proj")
            )
        gelu, shared = self._config.activation == "gelu_tanh", self._shared(prefix, experts)
        return ops.mixture(MixtureParts(router, weights, shared, experts, gelu, correction))

    def _biases(self, experts: Sequence[str], *matrices: str) -> torch.Tensor:
        """The biases of these experts, [E, out]."""
        names = [[f"{one}{matrix}.bias" for matrix in matrices] for one in experts]
        return torch.stack([torch.cat([self._reader.read(name) for name in own]) for own in names])

    def _shared(self, prefix: str, experts: ExpertsConfig) -> SharedExpert | None:
        if experts.shared_size is None:
            return None
        mlp, gate = self._mlp(f"{prefix}shared_expert."), None
        if experts.shared_gate:
            gate = self._linears.make((f"{prefix}shared_expert_gate.weight",), exact=True)
        return SharedExpert(mlp, gate)

    def _mlp(
        self, prefix: str, bias: bool = False, swiglu: ClampedSwiGLU | None = None
    ) -> GatedMLP:
        gate_up = self._linear(prefix, ("gate_proj", "up_proj"), bias)
        activated, silu = None, self._config.activation == "silu" and swiglu is None
        if isinstance(gate_up, ActivatedLinear) and silu:
            gate_up.mark_gated()
            activated = gate_up.activated
        return GatedMLP(
            gate_up=gate_up,
            down=self._linear(prefix, ("down_proj",), bias),
            activation=self._activation if swiglu is None else partial(clamped_swiglu, swiglu),
            activated=activated,
        )

    def _linear(
        self, prefix: str, names: tuple[str, ...], bias: bool, exact: bool = False
    ) -> Linear:
        return self._linears.make(
            tuple(f"{prefix}{name}.weight" for name in names),
            tuple(f"{prefix}{name}.bias" for name in names) if bias else (),
            exact,
        )


def _names(prefix: str, *matrices: str) -> Names:
    return tuple(f"{prefix}{name}.weight" for name in matrices)
