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
from ..kernels.ops import NativeOps
from ..lora.batch import LayerLoRA
from ..lora.shapes import LayerShapes, lora_shapes
from .base import ForwardBatch, KVShape
from .config import ExpertsConfig, ModelConfig
from .feed_forward import FeedForward, GatedActivation, GatedMLP, SharedExpert, SparseMoe
from .layers import Linear, make_linear
from .linear_maker import LinearMaker, OwnLinears
from .ops import HeadShape, Ops, QKNorm, WideOps, gelu_tanh_mul, soft_cap
from .qkv import QKVAttention, QKVRows
from .rotary import RotaryTable
from .weights import Shape, WeightReader

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
    def can_be_recorded(self) -> bool:
        """Whether a step waits for nothing: a mixture asks how many rows each expert has."""
        return self._config.experts is None

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
            output = layer.o(attended)
            if adapted is not None:
                adapted.add("o", attended, output)
            output = self._output_norm(output, layer.attention_output_norm)
            hidden, residual = self._ops.add_rms_norm(output, residual, layer.mlp_norm, eps)
            output = self._output_norm(layer.mlp(hidden, adapted), layer.mlp_output_norm)
            norm = self._norm if last else self._layers[index + 1].input_norm
            hidden, residual = self._ops.add_rms_norm(output, residual, norm, eps)
        return soft_cap(self._lm_head(hidden), self._config.logits_softcap)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self._lookup(ids)
        return embedded if self._embedding_scale is None else embedded * self._embedding_scale

    def _lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._embedding)

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
    """A checkpoint's weights, laid out for `ops`; `quantize` keeps linear layers in 8 bits, for
    which those must be native. Raises CheckpointError."""
    reader.check(expected_tensors(config), ignored=ignored_tensors(config))
    executor = ops.executor if isinstance(ops, NativeOps) else None
    whole = ops.linear if isinstance(ops, OwnLinears) else make_linear
    linears = LinearMaker(reader, executor, quantize, whole)
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
        return SparseMoe(
            router=self._linears.make((f"{prefix}gate.weight",), exact=True),
            experts=[self._mlp(f"{prefix}experts.{one}.") for one in range(experts.count)],
            shared=self._shared(prefix) if experts.shared_size is not None else None,
            config=experts,
        )

    def _shared(self, prefix: str) -> SharedExpert:
        return SharedExpert(
            mlp=self._mlp(f"{prefix}shared_expert."),
            gate=self._linears.make((f"{prefix}shared_expert_gate.weight",), exact=True),
        )

    def _mlp(self, prefix: str, bias: bool = False) -> GatedMLP:
        return GatedMLP(
            gate_up=self._linear(prefix, ("gate_proj", "up_proj"), bias),
            down=self._linear(prefix, ("down_proj",), bias),
            activation=self._activation,
        )

    def _linear(self, prefix: str, names: tuple[str, ...], bias: bool) -> Linear:
        return self._linears.make(
            tuple(f"{prefix}{name}.weight" for name in names),
            tuple(f"{prefix}{name}.bias" for name in names) if bias else (),
        )


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Names and shapes of a checkpoint's tensors, under Llama's names."""
    hidden = config.hidden_size
    expected: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        expected |= {prefix + name: shape for name, shape in _layer_tensors(config, index).items()}
    expected["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        expected["lm_head.weight"] = (config.vocab_size, hidden)
    return expected


def _layer_tensors(config: ModelConfig, index: int) -> dict[str, Shape]:
    hidden, dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    found: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.output_norms:
        found["pre_feedforward_layernorm.weight"] = (hidden,)
        found["post_feedforward_layernorm.weight"] = (hidden,)
    found |= _matrix("self_attn.q_proj", q, hidden, config.qkv_bias)
    found |= _matrix("self_attn.k_proj", kv, hidden, config.qkv_bias)
    found |= _matrix("self_attn.v_proj", kv, hidden, config.qkv_bias)
    found |= _matrix("self_attn.o_proj", hidden, q, config.o_bias)
    if config.qk_norm:
        found |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    if config.experts is not None and config.experts.sparse[index]:
        return found | _moe_tensors(config.experts, hidden)
    return found | _mlp_tensors("mlp", hidden, config.intermediate_size, config.mlp_bias)


def _moe_tensors(experts: ExpertsConfig, hidden: int) -> dict[str, Shape]:
    found: dict[str, Shape] = {"mlp.gate.weight": (experts.count, hidden)}
    for index in range(experts.count):
        found |= _mlp_tensors(f"mlp.experts.{index}", hidden, experts.intermediate_size)
    if experts.shared_size is not None:
        found |= _mlp_tensors("mlp.shared_expert", hidden, experts.shared_size)
        found["mlp.shared_expert_gate.weight"] = (1, hidden)
    return found


def _mlp_tensors(prefix: str, hidden: int, inner: int, bias: bool = False) -> dict[str, Shape]:
    return {
        **_matrix(f"{prefix}.gate_proj", inner, hidden, bias),
        **_matrix(f"{prefix}.up_proj", inner, hidden, bias),
        **_matrix(f"{prefix}.down_proj", hidden, inner, bias),
    }


def _matrix(name: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if bias else weight


def ignored_tensors(config: ModelConfig) -> tuple[str, ...]:
    """A tied output matrix may be saved a second time."""
    return ("lm_head.weight",) if config.tie_word_embeddings else ()
