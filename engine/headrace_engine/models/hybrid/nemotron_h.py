"""Nemotron-H: each layer is a Mamba-2 layer, attention without positions, an MLP or a mixture."""

from dataclasses import dataclass

import torch

from ...checkpoints.architectures import Architecture
from ...checkpoints.config import ExpertsConfig
from ...checkpoints.fields import Fields
from ...checkpoints.rope import RopeConfig
from ...checkpoints.tensor_files import Shape
from ...layers.feed_forward import FeedForward, GatedMLP, SparseMoe
from ...layers.layers import Linear
from ...lora.batch import LayerLoRA
from ...operators.base import squared_relu
from ...operators.recurrent import Mamba2Shape
from .decoder import HybridWeights, ResidualPart
from .family import Parts, layer_types
from .layers import FeedForwardLayer, FeedForwardSum, HybridLayer
from .mamba2 import WithMamba2
from .ranks import Division
from .tensors import Tensors

# The letters of hybrid_override_pattern.
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
# Older names of the kinds of layers.
_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


class NemotronH(WithMamba2):
    """The shape of one checkpoint. Raises ConfigError for fields that are not supported.

    Time steps have no lower limit, as in training. transformers raises those of prompts, but not of
    generated tokens, to time_step_min.
    """

    architecture = Architecture(max_position_embeddings=4096)
    prefixes = ("backbone.", "model.")
    embedding = "embeddings"
    mamba_part = ".mixer."
    mamba_names = ("mamba_num_heads", "n_groups")

    def __init__(self, fields: Fields) -> None:
        self.types = _types(fields)
        super().__init__(fields, len(self.types))
        fields.require("mlp_hidden_act", ("relu2",), default="relu2")
        fields.require("mamba_hidden_act", ("silu", "swish"), default="silu")
        fields.require("attention_bias", (False,), default=False)
        fields.require("sliding_window", (None,), default=None)
        self.heads = fields.integer("num_attention_heads", 32)
        self.kv_heads = fields.integer("num_key_value_heads", 8)
        self.head_dim = fields.integer("head_dim", 128)
        self.eps = fields.number("layer_norm_epsilon", 1e-5)
        self.tied = fields.flag("tie_word_embeddings")
        self.inner = fields.integer("intermediate_size", 21504)
        self.mlp_bias = fields.flag("mlp_bias")
        self.mamba = Mamba2Shape(
            heads=fields.integer("mamba_num_heads", 128),
            head_dim=fields.integer("mamba_head_dim", 64),
            groups=fields.integer("mamba_n_groups", fields.integer("n_groups", 8)),
            state_size=fields.integer("ssm_state_size", 128),
            window=fields.integer("mamba_d_conv", fields.integer("conv_kernel", 4)),
        )
        if self.mamba.heads % self.mamba.groups:
            raise fields.error("n_groups", f"a divisor of mamba_num_heads ({self.mamba.heads})")
        self.conv_bias = fields.flag("mamba_conv_bias", fields.flag("use_conv_bias", True))
        self.proj_bias = fields.flag("use_bias")
        self.experts = self._experts() if "moe" in self.types else None

    def rope(self) -> RopeConfig | None:
        return None

    def _experts(self) -> ExpertsConfig:
        fields = self.fields
        count = fields.integer("n_routed_experts", 8)
        chosen = fields.integer("num_experts_per_tok", 2)
        groups, kept = fields.integer("n_group", 1), fields.integer("topk_group", 1)
        if count % groups:
            raise fields.error("n_group", f"a divisor of n_routed_experts ({count})")
        if kept > groups:
            raise fields.error("topk_group", f"at most n_group ({groups})")
        if chosen > count // groups * kept:
            raise fields.error("num_experts_per_tok", "at most the experts of topk_group groups")
        return ExpertsConfig(
            count=count,
            per_token=chosen,
            intermediate_size=fields.integer("moe_intermediate_size", 7688),
            renormalise=fields.flag("norm_topk_prob", True),
            shared_size=fields.integer("moe_shared_expert_intermediate_size", 7688),
            sparse=tuple(kind == "moe" for kind in self.types),
            sigmoid=True,
            correction=True,
            groups=groups,
            kept_groups=kept,
            group_best=2,
            factor=fields.number("routed_scaling_factor", 1.0),
        )

    def inner_sizes(self) -> dict[str, int]:
        return {"intermediate_size": self.inner} if "mlp" in self.types else {}

    def division(self, name: str, whole: Shape) -> Division | None:
        if name.endswith(".fc2_latent_proj.bias"):
            return Division(0, (), "once")
        return super().division(name, whole)

    def build(self, tensors: Tensors, parts: Parts) -> HybridWeights:
        blocks: list[ResidualPart] = []
        attentions = states = 0
        layer: HybridLayer
        for index, kind in enumerate(self.types):
            prefix = f"{self.prefix}layers.{index}."
            norm = tensors.tensor(f"{prefix}norm.weight", self.hidden)
            prefix = f"{prefix}mixer."
            if kind == "linear_attention":
                layer = self.mamba2(
                    tensors, parts.ops, prefix, states,
                    conv_bias=self.conv_bias, proj_bias=self.proj_bias,
                )  # fmt: skip
                states += 1
            elif kind == "full_attention":
                scale = self.head_dim**-0.5
                layer = self.attention(tensors, parts, prefix, attentions, scale=scale)
                attentions += 1
            elif kind == "mlp":
                layer = FeedForwardLayer(self._mlp(tensors, prefix, self.inner))
            else:
                layer = FeedForwardLayer(self._mixture(tensors, prefix), index)
            blocks.append(ResidualPart(norm, layer))
        norm = tensors.tensor(f"{self.prefix}norm_f.weight", self.hidden)
        tensors_of_state = self.mamba.states(parts.dtype)
        return self.decoder(tensors, blocks, norm, attentions, states, tensors_of_state)

    def _mlp(self, tensors: Tensors, prefix: str, inner: int) -> GatedMLP:
        return GatedMLP(
            tensors.linear({f"{prefix}up_proj": inner}, self.hidden, self.mlp_bias),
            tensors.linear({f"{prefix}down_proj": self.hidden}, inner, self.mlp_bias),
            squared_relu,
        )

    def _mixture(self, tensors: Tensors, prefix: str) -> FeedForward:
        experts, hidden = self.experts, self.hidden
        assert experts is not None and experts.shared_size is not None
        router = tensors.linear({f"{prefix}gate": experts.count}, hidden, exact=True)
        correction = tensors.float32(f"{prefix}gate.e_score_correction_bias", experts.count)
        latent = self.fields.optional_integer("moe_latent_size", None)
        width, inner = latent or hidden, experts.intermediate_size
        below = f"{prefix}experts."
        ups = tensors.experts(below, experts, "up_proj", {"up_proj": inner}, width)
        downs = tensors.experts(below, experts, "down_proj", {"down_proj": width}, inner)
        mlps = [GatedMLP(*both, squared_relu) for both in zip(ups, downs, strict=True)]
        sparse = SparseMoe(router, mlps, None, experts, correction)
        mixture: FeedForward = sparse
        if latent is not None:
            into = {f"{prefix}fc1_latent_proj": latent}
            back = {f"{prefix}fc2_latent_proj": hidden}
            mixture = LatentMoe(
                mixture=sparse,
                into=tensors.linear(into, hidden, self.mlp_bias),
                back=tensors.linear(back, latent, self.mlp_bias),
            )
        shared = self._mlp(tensors, f"{prefix}shared_experts.", experts.shared_size)
        return FeedForwardSum((mixture, shared))


@dataclass(frozen=True, slots=True)
class LatentMoe:
    """A mixture whose router sees rows of the decoder, and its experts narrower ones."""

    mixture: SparseMoe
    into: Linear
    back: Linear

    @property
    def can_be_recorded(self) -> bool:
        return self.mixture.can_be_recorded

    def __call__(
        self, x: torch.Tensor, lora: LayerLoRA | None = None, slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.back(self.mixture.mix(self.into(x), *self.mixture.route(x), lora))


def _types(fields: Fields) -> list[str]:
    """The kind of each layer, by its name or by its letter."""
    listed = "layer_types" if "layer_types" in fields else "layers_block_type"
    kinds = fields.get(listed, None)
    if kinds is None:
        listed = "hybrid_override_pattern"
        letters = fields.get(listed, None)
        kinds = [_LETTERS.get(one, one) for one in letters] if isinstance(letters, str) else None
    if not isinstance(kinds, list) or not kinds:
        raise fields.error(listed, "the kinds of all layers")
    current = [_KINDS.get(kind, kind) for kind in kinds]
    known = Fields(fields.path, {"layer_types": current})
    wanted, others = ("linear_attention", "full_attention"), ("mlp", "moe")
    return layer_types(known, wanted, [""] * len(current), others)
