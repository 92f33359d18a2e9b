"""The native decoder: Llama, Mistral, Qwen2 and Qwen3 as one model with a few switches.

Fused products for QKV and for gate and up; logits only for the rows that sample, and behind the
last layer's attention only those rows are computed at all.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..attention.base import AttentionBackend, LayerCache, LayerParams
from .base import ForwardBatch, KVShape
from .config import ModelConfig
from .layers import Linear, make_linear
from .ops import HeadShape, Ops, QKNorm
from .rotary import RotaryTable
from .weights import Shape, WeightReader


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm: torch.Tensor
    post_attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: QKNorm | None
    o: Linear
    gate_up: Linear
    down: Linear
    params: LayerParams


class Decoder:
    """A decoder whose weights `load` has read. Pre-norm residual blocks with a gated MLP."""

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        rotary: RotaryTable,
        ops: Ops,
        attention: AttentionBackend,
    ) -> None:
        self._config, self._rotary, self._ops, self._attention = config, rotary, ops, attention
        self._heads = HeadShape(
            config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        )
        reader.check(expected_tensors(config), ignored=ignored_tensors(config))
        self._embedding = reader.read("model.embed_tokens.weight")
        self._layers = [_read_layer(config, reader, index) for index in range(config.num_layers)]
        self._norm = reader.read("model.norm.weight")
        tied = config.tie_word_embeddings
        self._lm_head = make_linear(self._embedding if tied else reader.read("lm_head.weight"))

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        shape = KVShape(self._config.num_kv_heads, self._config.head_dim)
        return (shape,) * self._config.num_layers

    def forward(self, batch: ForwardBatch, caches: Rows[LayerCache]) -> torch.Tensor:
        eps = self._config.rms_norm_eps
        cos, sin = self._rotary.lookup(batch.positions)
        residual = F.embedding(batch.input_ids, self._embedding)
        hidden = self._ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            attended = self._attend(layer, hidden, (cos, sin), cache, batch)
            last = index + 1 == len(self._layers)
            if last:
                attended = attended.index_select(0, batch.logits_rows)
                residual = residual.index_select(0, batch.logits_rows)
            hidden, residual = self._ops.add_rms_norm(
                layer.o(attended), residual, layer.post_attention_norm, eps
            )
            hidden = layer.down(self._ops.silu_mul(layer.gate_up(hidden)))
            norm = self._norm if last else self._layers[index + 1].input_norm
            hidden, residual = self._ops.add_rms_norm(hidden, residual, norm, eps)
        return self._lm_head(hidden)

    def _attend(
        self,
        layer: DecoderLayer,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        query, key, value = self._ops.rotate_qkv(
            layer.qkv(hidden), *rotation, self._heads, layer.qk_norm
        )
        attended = self._attention.forward(query, key, value, cache, batch.metadata, layer.params)
        return attended.reshape(attended.shape[0], -1)


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Names and shapes of a checkpoint's tensors, as transformers saves them."""
    hidden = config.hidden_size
    expected: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        expected |= {prefix + name: shape for name, shape in _layer_tensors(config).items()}
    expected["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        expected["lm_head.weight"] = (config.vocab_size, hidden)
    return expected


def _layer_tensors(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    matrices = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    found: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, bias) in matrices.items():
        found[f"{name}.weight"] = (rows, columns)
        if bias:
            found[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        found |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return found


def ignored_tensors(config: ModelConfig) -> tuple[str, ...]:
    """A tied output matrix may be saved a second time."""
    return ("lm_head.weight",) if config.tie_word_embeddings else ()


def _read_layer(config: ModelConfig, reader: WeightReader, index: int) -> DecoderLayer:
    prefix = f"model.layers.{index}."
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    window = config.windows[index]
    return DecoderLayer(
        input_norm=reader.read(f"{prefix}input_layernorm.weight"),
        post_attention_norm=reader.read(f"{prefix}post_attention_layernorm.weight"),
        qkv=_linear(reader, attention, ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
        qk_norm=_qk_norm(reader, attention) if config.qk_norm else None,
        o=_linear(reader, attention, ("o_proj",), config.o_bias),
        gate_up=_linear(reader, mlp, ("gate_proj", "up_proj"), config.mlp_bias),
        down=_linear(reader, mlp, ("down_proj",), config.mlp_bias),
        params=LayerParams(scale=config.head_dim**-0.5, sliding_window=window),
    )


def _linear(reader: WeightReader, prefix: str, names: tuple[str, ...], bias: bool) -> Linear:
    return make_linear(
        reader.stack(f"{prefix}{name}.weight" for name in names),
        reader.stack(f"{prefix}{name}.bias" for name in names) if bias else None,
    )


def _qk_norm(reader: WeightReader, prefix: str) -> QKNorm:
    return QKNorm(
        query=reader.read(f"{prefix}q_norm.weight"), key=reader.read(f"{prefix}k_norm.weight")
    )
