"""Granite 4-H: Mamba-2 layers and attention, with a mixture of experts beside a shared MLP."""

from ...checkpoints.architectures import Architecture
from ...checkpoints.config import ExpertsConfig
from ...checkpoints.fields import Fields
from ...checkpoints.rope import RopeConfig
from ...checkpoints.tensor_files import Shape
from ...layers.feed_forward import FeedForward, GatedMLP, SparseMoe
from .decoder import HybridWeights, ResidualPart
from .family import Parts, layer_types
from .layers import FeedForwardLayer, FeedForwardSum
from .mamba2 import WithMamba2, read_shape
from .ranks import Division
from .tensors import Tensors

# Older names of the kinds of layers.
_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


class GraniteHybrid(WithMamba2):
    """The shape of one checkpoint. Raises ConfigError for fields that are not supported."""

    architecture = Architecture(max_position_embeddings=2048)
    stacked_experts = (
        ".block_sparse_moe.input_linear.weight",
        ".block_sparse_moe.output_linear.weight",
    )
    expert_size = "intermediate_size"

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        fields.require("hidden_act", ("silu", "swish"), default="silu")
        fields.require("position_embedding_type", (None, "nope", "rope"), default=None)
        self.rotated = fields.get("position_embedding_type", None) == "rope"
        self.heads = fields.integer("num_attention_heads", 32)
        self.kv_heads = fields.integer("num_key_value_heads", self.heads)
        self.head_dim = self.hidden // self.heads
        self.bias = fields.flag("attention_bias")
        self.eps = fields.number("rms_norm_eps", 1e-6)
        self.tied = fields.flag("tie_word_embeddings")
        self.mamba = read_shape(fields, fields.integer("mamba_expand", 2) * self.hidden)
        self.conv_bias = fields.flag("mamba_conv_bias", True)
        self.proj_bias = fields.flag("mamba_proj_bias")
        self.inner = fields.integer("shared_intermediate_size", 1024)
        self.residual = fields.number("residual_multiplier", 1.0)
        self.types = _types(fields, self.layers)
        self.experts = self._experts()

    def rope(self) -> RopeConfig | None:
        return super().rope() if self.rotated else None

    def _experts(self) -> ExpertsConfig | None:
        fields = self.fields
        if fields.get("num_local_experts", 8) == 0:
            return None
        count = fields.integer("num_local_experts", 8)
        chosen = fields.integer("num_experts_per_tok", 2)
        if chosen > count:
            raise fields.error("num_experts_per_tok", f"at most num_local_experts ({count})")
        return ExpertsConfig(
            count=count,
            per_token=chosen,
            intermediate_size=fields.integer("intermediate_size", 11008),
            renormalise=True,
            shared_size=None,
            sparse=(True,) * self.layers,
        )

    def inner_sizes(self) -> dict[str, int]:
        return {"shared_intermediate_size": self.inner}

    def division(self, name: str, whole: Shape) -> Division | None:
        last = len(whole) - 1  # matrices of experts have one dimension more
        if name.endswith(".input_linear.weight"):
            return Division(last - 1, (whole[last - 1] // 2,) * 2, "inner")
        if name.endswith(".output_linear.weight"):
            return Division(last, (whole[last],), "inner")
        return super().division(name, whole)

    def build(self, tensors: Tensors, parts: Parts) -> HybridWeights:
        hidden, fields = self.hidden, self.fields
        blocks: list[ResidualPart] = []
        attentions = states = 0
        for index, kind in enumerate(self.types):
            prefix = f"{self.prefix}layers.{index}."
            norm = tensors.tensor(f"{prefix}input_layernorm.weight", hidden)
            if kind == "linear_attention":
                mamba = self.mamba2(
                    tensors, parts.ops, f"{prefix}mamba.", states,
                    conv_bias=self.conv_bias, proj_bias=self.proj_bias,
                )  # fmt: skip
                blocks.append(ResidualPart(norm, mamba, self.residual))
                states += 1
            else:
                attention = self.attention(
                    tensors, parts, f"{prefix}self_attn.", attentions,
                    scale=fields.number("attention_multiplier", 1.0), bias=self.bias,
                )  # fmt: skip
                blocks.append(ResidualPart(norm, attention, self.residual))
                attentions += 1
            norm = tensors.tensor(f"{prefix}post_attention_layernorm.weight", hidden)
            layer = FeedForwardLayer(self._feed_forward(tensors, parts, prefix), index)
            blocks.append(ResidualPart(norm, layer, self.residual))
        norm = tensors.tensor(f"{self.prefix}norm.weight", hidden)
        return self.decoder(
            tensors, blocks, norm, attentions, states, self.mamba.states(parts.dtype),
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            logits_divisor=fields.number("logits_scaling", 1.0),
        )  # fmt: skip

    def _feed_forward(self, tensors: Tensors, parts: Parts, prefix: str) -> FeedForward:
        hidden, activation = self.hidden, parts.ops.silu_mul
        experts, mixture = self.experts, None
        if experts is not None:
            moe, inner = f"{prefix}block_sparse_moe.", experts.intermediate_size
            router = tensors.linear({f"{moe}router.layer": experts.count}, hidden, exact=True)
            both = (inner, inner)
            gate_ups = tensors.stacked(f"{moe}input_linear.weight", experts, both, hidden)
            downs = tensors.stacked(f"{moe}output_linear.weight", experts, (hidden,), inner)
            mlps = [GatedMLP(*one, activation) for one in zip(gate_ups, downs, strict=True)]
            mixture = SparseMoe(router, mlps, None, experts)
        shared = f"{prefix}shared_mlp."
        mlp = GatedMLP(
            tensors.linear({f"{shared}input_linear": 2 * self.inner}, hidden),
            tensors.linear({f"{shared}output_linear": hidden}, self.inner),
            activation,
        )
        return mlp if mixture is None else FeedForwardSum((mixture, mlp))


def _types(fields: Fields, layers: int) -> list[str]:
    name = "layer_types" if "layer_types" in fields else "layers_block_type"
    kinds = fields.get(name, ["linear_attention"] * layers)
    if not isinstance(kinds, list):
        raise fields.error(name, f"a list of {layers} names")
    current = [_KINDS.get(kind, kind) for kind in kinds]
    wanted = ("linear_attention", "full_attention")
    return layer_types(Fields(fields.path, {"layer_types": current}), wanted, [""] * layers)
