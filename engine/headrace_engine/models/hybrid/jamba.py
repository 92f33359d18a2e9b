"""Jamba: Mamba layers and attention without positions, each with an MLP or a mixture after it."""

from ...checkpoints.architectures import Architecture
from ...checkpoints.config import ExpertsConfig
from ...checkpoints.fields import Fields
from ...checkpoints.rope import RopeConfig
from ...layers.feed_forward import FeedForward
from .decoder import HybridWeights, ResidualPart
from .family import Parts
from .layers import FeedForwardLayer, HybridLayer
from .mamba import MambaShape, WithMamba
from .tensors import Tensors


class Jamba(WithMamba):
    """The shape of one checkpoint. Raises ConfigError for fields that are not supported."""

    architecture = Architecture(max_position_embeddings=262144)
    expert_size = "intermediate_size"
    experts: ExpertsConfig

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        fields.require("hidden_act", ("silu", "swish"), default="silu")
        fields.require("mamba_inner_layernorms", (True,), default=True)
        fields.require("sliding_window", (None,), default=None)
        self.read_heads()
        self.eps = fields.number("rms_norm_eps", 1e-6)
        self.tied = fields.flag("tie_word_embeddings")
        self.inner = fields.integer("intermediate_size", 14336)
        rank = fields.get("mamba_dt_rank", "auto")
        self.mamba = MambaShape(
            width=fields.integer("mamba_expand", 2) * self.hidden,
            state_size=fields.integer("mamba_d_state", 16),
            rank=-(-self.hidden // 16) if rank == "auto" else fields.integer("mamba_dt_rank"),
            window=fields.integer("mamba_d_conv", 4),
        )
        self.conv_bias = fields.flag("mamba_conv_bias", True)
        self.proj_bias = fields.flag("mamba_proj_bias")
        self.attends = self._every("attn_layer", 8, 4)
        if not any(self.attends) or all(self.attends):
            raise fields.error("attn_layer_period", "such that some, not all layers attend")
        self.experts = self._experts()

    def _every(self, name: str, period: int, offset: int) -> tuple[bool, ...]:
        """For each layer: whether it is one of those that two fields count."""
        period = self.fields.integer(f"{name}_period", period)
        offset = self.fields.count(f"{name}_offset", offset)
        if offset >= period:
            raise self.fields.error(f"{name}_offset", f"below {name}_period ({period})")
        return tuple(index % period == offset for index in range(self.layers))

    def _experts(self) -> ExpertsConfig:
        count = self.fields.integer("num_experts", 16)
        chosen = self.fields.integer("num_experts_per_tok", 2)
        if chosen > count > 1:
            raise self.fields.error("num_experts_per_tok", f"at most num_experts ({count})")
        sparse = self._every("expert_layer", 2, 1)
        return ExpertsConfig(
            count=count,
            per_token=chosen,
            intermediate_size=self.inner,
            renormalise=False,
            shared_size=None,
            sparse=tuple(one and count > 1 for one in sparse),
        )

    def rope(self) -> RopeConfig | None:
        return None

    def inner_sizes(self) -> dict[str, int]:
        return {} if all(self.experts.sparse) else {"intermediate_size": self.inner}

    def build(self, tensors: Tensors, parts: Parts) -> HybridWeights:
        blocks: list[ResidualPart] = []
        attentions = states = 0
        layer: HybridLayer
        for index, attends in enumerate(self.attends):
            prefix = f"{self.prefix}layers.{index}."
            norm = tensors.tensor(f"{prefix}input_layernorm.weight", self.hidden)
            if attends:
                scale = self.head_dim**-0.5
                below = f"{prefix}self_attn."
                layer = self.attention(tensors, parts, below, attentions, scale=scale)
                attentions += 1
            else:
                layer = self.mamba_layer(
                    tensors, parts.ops, f"{prefix}mamba.", states, eps=self.eps,
                    conv_bias=self.conv_bias, proj_bias=self.proj_bias,
                )  # fmt: skip
                states += 1
            blocks.append(ResidualPart(norm, layer))
            norm = tensors.tensor(f"{prefix}pre_ff_layernorm.weight", self.hidden)
            make = self._mixture if self.experts.sparse[index] else self._mlp
            mlp = make(tensors, parts, f"{prefix}feed_forward.")
            blocks.append(ResidualPart(norm, FeedForwardLayer(mlp, index)))
        norm = tensors.tensor(f"{self.prefix}final_layernorm.weight", self.hidden)
        tensors_of_state = self.mamba.states(parts.dtype)
        return self.decoder(tensors, blocks, norm, attentions, states, tensors_of_state)

    def _mlp(self, tensors: Tensors, parts: Parts, prefix: str) -> FeedForward:
        return self.gated_mlp(tensors, parts, prefix, self.inner)

    def _mixture(self, tensors: Tensors, parts: Parts, prefix: str) -> FeedForward:
        router = tensors.linear({f"{prefix}router": self.experts.count}, self.hidden, exact=True)
        return self.mixture(tensors, parts, f"{prefix}experts.", router, self.experts)
