"""Bamba: Mamba-2 layers and attention, each followed by an MLP."""

from ...checkpoints.architectures import Architecture
from ...checkpoints.fields import Fields
from .decoder import HybridWeights, ResidualPart
from .family import Parts
from .layers import FeedForwardLayer, HybridLayer
from .mamba2 import WithMamba2, read_shape
from .tensors import Tensors


class Bamba(WithMamba2):
    """The shape of one checkpoint. Raises ConfigError for fields that are not supported."""

    architecture = Architecture(max_position_embeddings=262144, partial_rotary=0.5)

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        fields.require("hidden_act", ("silu", "swish"), default="silu")
        fields.require("partial_rotary_factor", (0.5,), default=0.5)
        self.read_heads()
        self.bias = fields.flag("attention_bias")
        self.eps = fields.number("rms_norm_eps", 1e-5)
        self.tied = fields.flag("tie_word_embeddings")
        self.inner = fields.integer("intermediate_size", 14336)
        self.mlp_bias = fields.flag("mlp_bias")
        self.mamba = read_shape(fields, fields.integer("mamba_expand", 2) * self.hidden)
        self.conv_bias = fields.flag("mamba_conv_bias", True)
        self.proj_bias = fields.flag("mamba_proj_bias")
        listed = fields.get("attn_layer_indices", [])
        if not isinstance(listed, list) or not 0 < len(listed) < self.layers:
            raise fields.error("attn_layer_indices", "a list of some, not all layers")
        self.attends = [index in listed for index in range(self.layers)]

    def inner_sizes(self) -> dict[str, int]:
        return {"intermediate_size": self.inner}

    def build(self, tensors: Tensors, parts: Parts) -> HybridWeights:
        blocks: list[ResidualPart] = []
        attentions = states = 0
        layer: HybridLayer
        for index, attends in enumerate(self.attends):
            prefix = f"{self.prefix}layers.{index}."
            norm = tensors.tensor(f"{prefix}input_layernorm.weight", self.hidden)
            if attends:
                layer = self.attention(
                    tensors, parts, f"{prefix}self_attn.", attentions,
                    scale=self.head_dim**-0.5, bias=self.bias,
                )  # fmt: skip
                attentions += 1
            else:
                layer = self.mamba2(
                    tensors, parts.ops, f"{prefix}mamba.", states,
                    conv_bias=self.conv_bias, proj_bias=self.proj_bias,
                )  # fmt: skip
                states += 1
            blocks.append(ResidualPart(norm, layer))
            norm = tensors.tensor(f"{prefix}pre_ff_layernorm.weight", self.hidden)
            below = f"{prefix}feed_forward."
            mlp = self.gated_mlp(tensors, parts, below, self.inner, bias=self.mlp_bias)
            blocks.append(ResidualPart(norm, FeedForwardLayer(mlp)))
        norm = tensors.tensor(f"{self.prefix}final_layernorm.weight", self.hidden)
        tensors_of_state = self.mamba.states(parts.dtype)
        return self.decoder(tensors, blocks, norm, attentions, states, tensors_of_state)
