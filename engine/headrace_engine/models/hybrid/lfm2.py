"""LFM2: gated short convolutions and attention, with or without a mixture of experts."""

from typing import Self

from ...checkpoints.architectures import Architecture
from ...checkpoints.config import ExpertsConfig
from ...checkpoints.fields import Fields
from ...checkpoints.tensor_files import Shape
from ...layers.feed_forward import FeedForward
from ...operators.base import QKNorm
from ...operators.recurrent import Convolution, conv_state, recurrences_of
from ..parallel import Shard
from .decoder import HybridWeights, ResidualPart
from .family import Family, MatrixNames, Parts, layer_types
from .layers import AttentionLayer, FeedForwardLayer, ShortConvLayer
from .ranks import Division
from .tensors import Tensors

LFM2 = Architecture(
    max_position_embeddings=128_000,
    rope_theta=1_000_000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)
NAMES = MatrixNames(gate="w1", up="w3", down="w2")


class Lfm2(Family):
    """The shape of one checkpoint. Raises ConfigError for fields that are not supported."""

    architecture = LFM2

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        self.heads = fields.integer("num_attention_heads", 32)
        self.kv_heads = fields.integer("num_key_value_heads", 8)
        self.head_dim = fields.integer("head_dim", self.hidden // self.heads)
        self.eps = fields.number("norm_eps", 1e-5)
        self.tied = fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True))
        self.window = fields.integer("conv_L_cache", 3)
        self.bias = fields.flag("conv_bias")
        listed = fields.get("full_attn_idxs", list(range(self.layers)))
        default = ["full_attention" if at in listed else "conv" for at in range(self.layers)]
        self.types = layer_types(fields, ("full_attention", "conv"), default)
        self.inner = _inner(fields)
        self.channels = self.hidden

    def counts(self) -> dict[str, int]:
        return {**super().counts(), "hidden_size": self.hidden}

    def inner_sizes(self) -> dict[str, int]:
        return {"intermediate_size": self.inner}

    def divided(self, shard: Shard) -> Self:
        part = super().divided(shard)
        part.channels = self.channels // shard.size
        return part

    def division(self, name: str, whole: Shape) -> Division | None:
        if ".conv.in_proj." in name:
            return Division(0, (whole[0] // 3,) * 3)
        return Division(0, (whole[0],)) if ".conv.conv." in name else super().division(name, whole)

    def build(self, tensors: Tensors, parts: Parts) -> HybridWeights:
        hidden = self.hidden
        blocks: list[ResidualPart] = []
        attentions = states = 0
        for index, kind in enumerate(self.types):
            prefix = f"{self.prefix}layers.{index}."
            norm = tensors.tensor(f"{prefix}operator_norm.weight", hidden)
            if kind == "conv":
                blocks.append(ResidualPart(norm, self._convolution(tensors, parts, prefix, states)))
                states += 1
            else:
                blocks.append(
                    ResidualPart(norm, self._attention(tensors, parts, prefix, attentions))
                )
                attentions += 1
            norm = tensors.tensor(f"{prefix}ffn_norm.weight", hidden)
            mlp = self.feed_forward(tensors, parts, f"{prefix}feed_forward.", index)
            blocks.append(ResidualPart(norm, FeedForwardLayer(mlp, index)))
        norm = tensors.tensor(f"{self.prefix}embedding_norm.weight", hidden)
        window = conv_state(self.channels, self.window, parts.dtype)
        return self.decoder(tensors, blocks, norm, attentions, states, (window,))

    def _convolution(
        self, tensors: Tensors, parts: Parts, prefix: str, index: int
    ) -> ShortConvLayer:
        hidden, prefix = self.hidden, f"{prefix}conv."
        weight = tensors.tensor(f"{prefix}conv.weight", self.channels, 1, self.window)
        bias = tensors.tensor(f"{prefix}conv.bias", self.channels) if self.bias else None
        convolution = Convolution(weight[:, 0], bias)
        return ShortConvLayer(
            index=index,
            input=tensors.linear({f"{prefix}in_proj": 3 * hidden}, hidden, self.bias),
            convolution=recurrences_of(parts.ops).short_convolution(convolution),
            output=tensors.linear({f"{prefix}out_proj": hidden}, hidden, self.bias),
        )

    def _attention(self, tensors: Tensors, parts: Parts, prefix: str, index: int) -> AttentionLayer:
        prefix, dim = f"{prefix}self_attn.", self.head_dim
        norm = QKNorm(
            query=tensors.tensor(f"{prefix}q_layernorm.weight", dim),
            key=tensors.tensor(f"{prefix}k_layernorm.weight", dim),
        )
        return self.attention(
            tensors, parts, prefix, index, scale=dim**-0.5, norm=norm, output="out_proj"
        )

    def feed_forward(self, tensors: Tensors, parts: Parts, prefix: str, index: int) -> FeedForward:
        """The feed-forward part of layer `index`, whose tensors' names begin with `prefix`."""
        return self.gated_mlp(tensors, parts, prefix, self.inner, NAMES)


class Lfm2Moe(Lfm2):
    """LFM2 with a mixture of experts in all layers but the first ones."""

    experts: ExpertsConfig

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        self.inner = fields.integer("intermediate_size", 7168)
        dense = fields.count("num_dense_layers", 2)
        count = fields.integer("num_experts", 32)
        chosen = fields.integer("num_experts_per_tok", 4)
        if chosen > count:
            raise fields.error("num_experts_per_tok", f"at most num_experts ({count})")
        self.experts = ExpertsConfig(
            count=count,
            per_token=chosen,
            intermediate_size=fields.integer("moe_intermediate_size", 1792),
            renormalise=fields.flag("norm_topk_prob", True),
            shared_size=None,
            sparse=tuple(index >= dense for index in range(self.layers)),
            sigmoid=True,
            correction=fields.flag("use_expert_bias", True),
            factor=fields.number("routed_scaling_factor", 1.0),
        )

    def inner_sizes(self) -> dict[str, int]:
        return {} if all(self.experts.sparse) else super().inner_sizes()

    def feed_forward(self, tensors: Tensors, parts: Parts, prefix: str, index: int) -> FeedForward:
        experts = self.experts
        if not experts.sparse[index]:
            return super().feed_forward(tensors, parts, prefix, index)
        bias = (
            tensors.float32(f"{prefix}expert_bias", experts.count) if experts.correction else None
        )
        router = tensors.linear({f"{prefix}gate": experts.count}, self.hidden, exact=True)
        below = f"{prefix}experts."
        return self.mixture(tensors, parts, below, router, experts, NAMES, correction=bias)


def _inner(fields: Fields) -> int:
    """The MLP's inner size, as transformers derives it."""
    size = fields.integer("block_ff_dim", fields.integer("intermediate_size", 12288))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * size)
    multiple = fields.integer("block_multiple_of", 256)
    return -(-size // multiple) * multiple
