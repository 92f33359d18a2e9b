"""The native decoder: Llama, Mistral, Qwen, Phi-3, Gemma and mixtures of experts as one model with
a few switches.

Fused products for QKV and for gate and up; logits only for the rows that sample, and behind the
last layer's attention only those rows are computed at all.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from ..attention.base import AttentionBackend, LayerCache, LayerParams
from ..lora.batch import LayerLoRA
from ..lora.shapes import LayerShapes, lora_shapes
from ..triton_kernels.dependent import DependentLaunches
from .base import ForwardBatch, KVShape
from .config import ExpertsConfig, ModelConfig
from .decoder_tensors import expected_tensors, ignored_tensors
from .expert_weights import ExpertWeights, MixtureParts, Names, OwnMixtures
from .feed_forward import FeedForward, GatedActivation, GatedMLP, SharedExpert, SparseMoe
from .layers import ActivatedLinear, Linear
from .linear_maker import LinearMaker
from .ops import DependentOps, HeadShape, Ops, QKNorm, WideOps, gelu_tanh_mul, soft_cap
from .qkv import QKVAttention, QKVRows
from .rotary import RotaryTable
from .weights import WeightReader

Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """`attention_output_norm` and `mlp_output_norm` stand before the residual sums (Gemma)."""

    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    attention_output_norm: torch.Tensor | None
    mlp_output_norm: torch.Tensor | None
    qkv: Linear
    qk_norm: QKNorm | None
    o: Linear
    mlp: FeedForward
    params: LayerParams


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """`norm` stands before `lm_head`."""

    embedding: torch.Tensor
    layers: Rows[DecoderLayer]
    norm: torch.Tensor
    lm_head: Linear


class Decoder:
    """Pre-norm residual blocks with a gated MLP.

    `local_rotary` rotates the layers with a window; None where all layers share `rotary`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        rotary: RotaryTable,
        ops: Ops,
        attention: AttentionBackend,
        local_rotary: RotaryTable | None = None,
    ) -> None:
        self._ops: Ops = ops
        self._dependent = ops.dependent if isinstance(ops, DependentOps) else None
        self._config, self._attention = config, attention
        self._qkv_attention = attention if isinstance(attention, QKVAttention) else None
        self._rotary, self._local_rotary = rotary, local_rotary
        self._heads = HeadShape(
            config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        )
        self._embedding, self._layers = weights.embedding, weights.layers
        self._norm, self._lm_head = weights.norm, weights.lm_head
        self._embedding_scale = _rounded(config.embedding_scale, self._embedding.dtype)
        if self._norm.dtype is not self._embedding.dtype:
            self._ops = WideOps(ops)

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        shape = KVShape(self._config.num_kv_heads, self._config.head_dim)
        return (shape,) * self._config.num_layers

    @property
    def heads(self) -> HeadShape:
        """Of each layer, as far as they are here."""
        return self._heads

    @property
    def layer_params(self) -> LayerParams:
        """Of the first layer's attention."""
        return self._layers[0].params

    @property
    def dependent(self) -> DependentLaunches | None:
        """How its operators' kernels are launched; None: they have no say in it."""
        return self._dependent

    @property
    def can_be_recorded(self) -> bool:
        """Whether a step asks the device nothing while it runs."""
        return all(layer.mlp.can_be_recorded for layer in self._layers)

    @property
    def lora_shapes(self) -> tuple[LayerShapes, ...]:
        return lora_shapes(self._config)

    def forward(self, batch: ForwardBatch, caches: Rows[LayerCache]) -> torch.Tensor:
        eps, lora = self._config.rms_norm_eps, batch.lora
        rotation, local = self._rotations(batch.positions)
        residual, every = self._embed(batch.input_ids), _samples_every_row(batch)
        hidden = self._ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            turn = rotation if layer.params.sliding_window is None else local
            adapted = None if lora is None else lora.of_tokens(index)
            attended = self._attend(layer, hidden, turn, cache, batch, adapted)
            last = index + 1 == len(self._layers)
            if last and not every:
                attended = attended.index_select(0, batch.logits_rows)
                residual = residual.index_select(0, batch.logits_rows)
            if last:
                adapted = None if lora is None else lora.of_logits(index)
            output = self._project(layer, attended, adapted)
            output = self._output_norm(output, layer.attention_output_norm)
            hidden, residual = self._ops.add_rms_norm(output, residual, layer.mlp_norm, eps)
            slots = batch.metadata.slots if every or not last else None
            output = layer.mlp(hidden, adapted, slots)
            output = self._output_norm(output, layer.mlp_output_norm)
            norm = self._norm if last else self._layers[index + 1].input_norm
            hidden, residual = self._ops.add_rms_norm(output, residual, norm, eps)
        return soft_cap(self._lm_head(hidden), self._config.logits_softcap)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self._lookup(ids)
        return embedded if self._embedding_scale is None else embedded * self._embedding_scale

    def _lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._embedding)

    def _project(
        self, layer: DecoderLayer, attended: torch.Tensor, lora: LayerLoRA | None
    ) -> torch.Tensor:
        output = layer.o(attended)
        if lora is not None:
            lora.add("o", attended, output)
        return output

    def _rotations(self, positions: torch.Tensor) -> tuple[Rotation, Rotation]:
        """cos and sin of layers that see all keys, and of those with a window."""
        rotation = self._rotary.lookup(positions)
        if self._local_rotary is None:
            return rotation, rotation
        return rotation, self._local_rotary.lookup(positions)

    def _output_norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else self._ops.rms_norm(x, weight, self._config.rms_norm_eps)

    def _attend(
        self,
        layer: DecoderLayer,
        hidden: torch.Tensor,
        rotation: Rotation,
        cache: LayerCache,
        batch: ForwardBatch,
        lora: LayerLoRA | None,
    ) -> torch.Tensor:
        qkv = layer.qkv(hidden)
        if lora is not None:
            lora.add("qkv", hidden, qkv)
        if self._qkv_attention is not None:
            rows = QKVRows(qkv, *rotation, self._heads, layer.qk_norm)
            attended = self._qkv_attention.forward_qkv(rows, cache, batch.metadata, layer.params)
            return attended.reshape(attended.shape[0], -1)
        query, key, value = self._ops.rotate_qkv(qkv, *rotation, self._heads, layer.qk_norm)
        attended = self._attention.forward(query, key, value, cache, batch.metadata, layer.params)
        return attended.reshape(attended.shape[0], -1)


def _rounded(scale: float | None, dtype: torch.dtype) -> float | None:
    """To the weights' dtype, as the models were trained; on the host, as no step may wait."""
    return None if scale is None else float(torch.tensor(scale, dtype=dtype))


def read_weights(
    config: ModelConfig, reader: WeightReader, ops: Ops, quantize: bool = False
) -> DecoderWeights:
    """A checkpoint's weights, laid out for `ops`; `quantize` keeps linear layers in 8 bits, which
    those must be able to. Raises CheckpointError."""
    reader.check(expected_tensors(config), ignored=ignored_tensors(config))
    linears = LinearMaker(reader, ops, quantize)
    return make_weights(config, reader, linears, ops)


def _samples_every_row(batch: ForwardBatch) -> bool:
    """Whether it is a decode of all sequences: their rows are asked for in their order."""
    count = len(batch.logits_rows)
    return batch.metadata.num_decodes == len(batch.input_ids) == count


class TensorSource(Protocol):
    """Tensors by the decoder's names for them."""

    def read(self, name: str) -> torch.Tensor: ...


class LinearSource(Protocol):
    """Layers by the names of the matrices that lie below each other in them."""

    def make(
        self, weights: tuple[str, ...], biases: tuple[str, ...] = (), exact: bool = False
    ) -> Linear: ...

    def experts(self, experts: Rows[tuple[Names, Names]]) -> ExpertWeights | None:
        """The matrices of a mixture together, by each expert's names of (gate and up, down); None
        where they are not in a form for that."""


def make_weights(
    config: ModelConfig, reader: TensorSource, linears: LinearSource, ops: Ops
) -> DecoderWeights:
    """The decoder's layers, of tensors and linear layers wherever they come from."""
    source = _LayerReader(config, reader, linears, ops)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return DecoderWeights(
        embedding=reader.read("model.embed_tokens.weight"),
        layers=[source.layer(index) for index in range(config.num_layers)],
        norm=source.norm("model.norm.weight"),
        lm_head=linears.make((head,)),
    )


class _LayerReader:
    """Makes layers out of a checkpoint's tensors."""

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
        between = "pre_feedforward" if config.output_norms else "post_attention"
        return DecoderLayer(
            input_norm=self.norm(f"{prefix}input_layernorm.weight"),
            mlp_norm=self.norm(f"{prefix}{between}_layernorm.weight"),
            attention_output_norm=self._output_norm(f"{prefix}post_attention_layernorm.weight"),
            mlp_output_norm=self._output_norm(f"{prefix}post_feedforward_layernorm.weight"),
            qkv=self._linear(attention, ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
            qk_norm=self._qk_norm(attention) if config.qk_norm else None,
            o=self._linear(attention, ("o_proj",), config.o_bias),
            mlp=self._feed_forward(f"{prefix}mlp.", index),
            params=LayerParams(
                scale=config.scale,
                softcap=config.attention_softcap,
                sliding_window=config.windows[index],
                key_scale=config.kv_scale(index)[0],
                value_scale=config.kv_scale(index)[1],
            ),
        )

    def norm(self, name: str) -> torch.Tensor:
        """A norm's weights; those that stand beside 1 are added to it in float32."""
        weight = self._reader.read(name)
        return weight.float() + 1.0 if self._config.offset_norms else weight

    def _output_norm(self, name: str) -> torch.Tensor | None:
        return self.norm(name) if self._config.output_norms else None

    def _qk_norm(self, prefix: str) -> QKNorm:
        return QKNorm(
            query=self.norm(f"{prefix}q_norm.weight"), key=self.norm(f"{prefix}k_norm.weight")
        )

    def _feed_forward(self, prefix: str, index: int) -> FeedForward:
        experts = self._config.experts
        if experts is None or not experts.sparse[index]:
            return self._mlp(prefix, self._config.mlp_bias)
        router = self._linears.make((f"{prefix}gate.weight",), exact=True)
        grouped = self._grouped(prefix, router, experts)
        if grouped is not None:
            return grouped
        return SparseMoe(
            router=router,
            experts=[self._mlp(f"{prefix}experts.{one}.") for one in range(experts.count)],
            shared=self._shared(prefix, experts),
            config=experts,
        )

    def _grouped(self, prefix: str, router: Linear, experts: ExpertsConfig) -> FeedForward | None:
        """The experts as one, where there are operators for that and weights that they take."""
        ops, found = self._ops, [f"{prefix}experts.{one}." for one in range(experts.count)]
        if not isinstance(ops, OwnMixtures):
            return None
        weights = self._linears.experts(
            [(_names(one, "gate_proj", "up_proj"), _names(one, "down_proj")) for one in found]
        )
        if weights is None:
            return None
        gelu, shared = self._config.activation == "gelu_tanh", self._shared(prefix, experts)
        return ops.mixture(MixtureParts(router, weights, shared, experts, gelu))

    def _shared(self, prefix: str, experts: ExpertsConfig) -> SharedExpert | None:
        if experts.shared_size is None:
            return None
        return SharedExpert(
            mlp=self._mlp(f"{prefix}shared_expert."),
            gate=self._linears.make((f"{prefix}shared_expert_gate.weight",), exact=True),
        )

    def _mlp(self, prefix: str, bias: bool = False) -> GatedMLP:
        gate_up = self._linear(prefix, ("gate_proj", "up_proj"), bias)
        activated = None
        if isinstance(gate_up, ActivatedLinear) and self._config.activation == "silu":
            gate_up.mark_gated()
            activated = gate_up.activated
        return GatedMLP(
            gate_up=gate_up,
            down=self._linear(prefix, ("down_proj",), bias),
            activation=self._activation,
            activated=activated,
        )

    def _linear(self, prefix: str, names: tuple[str, ...], bias: bool) -> Linear:
        return self._linears.make(
            tuple(f"{prefix}{name}.weight" for name in names),
            tuple(f"{prefix}{name}.bias" for name in names) if bias else (),
        )


def _names(prefix: str, *matrices: str) -> Names:
    return tuple(f"{prefix}{name}.weight" for name in matrices)
