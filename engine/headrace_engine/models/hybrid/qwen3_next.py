"""Qwen3-Next: gated delta nets, gated attention and mixtures of experts."""

from dataclasses import dataclass, replace
from typing import Self

import torch

from ...checkpoints.architectures import Architecture
from ...checkpoints.config import ExpertsConfig, sparse_layers
from ...checkpoints.fields import Fields
from ...checkpoints.tensor_files import Shape
from ...layers.feed_forward import FeedForward, SharedExpert
from ...layers.layers import Linear
from ...operators.base import QKNorm
from ...operators.recurrent import (
    Convolution,
    DeltaShape,
    DeltaWeights,
    conv_state,
    recurrences_of,
)
from ..parallel import Shard
from .decoder import HybridWeights, ResidualPart
from .family import Family, Parts, layer_types
from .layers import (
    AttentionLayer,
    DeltaProjections,
    FeedForwardLayer,
    GatedDeltaLayer,
)
from .mtp import HybridMTPWeights
from .ranks import Division
from .tensors import Tensors

# The prefix of the tensors of the layer that predicts further tokens.
MTP = "mtp."


class Qwen3Next(Family):
    """The shape of one checkpoint. Raises ConfigError for fields that are not supported."""

    architecture = Architecture(rms_norm_eps=1e-6, partial_rotary=0.25)
    has_head = True

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        fields.require("hidden_act", ("silu", "swish"), default="silu")
        self.heads = fields.integer("num_attention_heads", 16)
        self.kv_heads = fields.integer("num_key_value_heads", 2)
        self.head_dim = fields.integer("head_dim", 256)
        self.bias = fields.flag("attention_bias")
        self.eps = fields.number("rms_norm_eps", 1e-6)
        self.tied = fields.flag("tie_word_embeddings")
        self.window = fields.integer("linear_conv_kernel_dim", 4)
        self.delta = DeltaShape(
            key_heads=fields.integer("linear_num_key_heads", 16),
            value_heads=fields.integer("linear_num_value_heads", 32),
            key_dim=fields.integer("linear_key_head_dim", 128),
            value_dim=fields.integer("linear_value_head_dim", 128),
        )
        if self.delta.value_heads % self.delta.key_heads:
            raise fields.error("linear_num_value_heads", "a multiple of linear_num_key_heads")
        every = fields.integer("full_attention_interval", 4)
        kinds = ("linear_attention", "full_attention")
        default = [kinds[(index + 1) % every == 0] for index in range(self.layers)]
        self.types = layer_types(fields, kinds, default)
        self.experts = self._experts()
        self.inner = fields.integer("intermediate_size", 5632)

    def _experts(self) -> ExpertsConfig | None:
        sparse = sparse_layers(self.fields)
        return self.routed(512, 10, self.fields.flag("norm_topk_prob", True), sparse)

    def routed(
        self, count: int, per_token: int, renormalise: bool, sparse: tuple[bool, ...]
    ) -> ExpertsConfig:
        """The mixtures, with `count` experts and `per_token` of them if config.json has neither."""
        fields = self.fields
        found = ExpertsConfig(
            count=fields.integer("num_experts", count),
            per_token=fields.integer("num_experts_per_tok", per_token),
            intermediate_size=fields.integer("moe_intermediate_size", 512),
            renormalise=renormalise,
            shared_size=fields.integer("shared_expert_intermediate_size", 512),
            sparse=sparse,
        )
        if found.per_token > found.count:
            raise fields.error("num_experts_per_tok", f"at most num_experts ({found.count})")
        return found

    def counts(self) -> dict[str, int]:
        return {**super().counts(), "linear_num_key_heads": self.delta.key_heads}

    def inner_sizes(self) -> dict[str, int]:
        sparse = (False,) if self.experts is None else self.experts.sparse
        return {} if all(sparse) else {"intermediate_size": self.inner}

    def divided(self, shard: Shard) -> Self:
        part, delta = super().divided(shard), self.delta
        part.inner = shard.inner_size(self.inner)
        part.delta = replace(
            delta,
            key_heads=delta.key_heads // shard.size,
            value_heads=delta.value_heads // shard.size,
        )
        return part

    def division(self, name: str, whole: Shape) -> Division | None:
        if ".linear_attn." not in name:
            return super().division(name, whole)
        delta, named = self.delta, name.removesuffix(".weight").rpartition(".")[2]
        if named in ("conv1d", "in_proj_qkv"):
            return Division(0, (delta.key_width, delta.key_width, delta.value_width))
        if named == "norm":
            return None
        return super().division(name, whole) if named == "out_proj" else Division(0, (whole[0],))

    def build(self, tensors: Tensors, parts: Parts) -> HybridWeights:
        blocks: list[ResidualPart] = []
        attentions = states = 0
        for index, kind in enumerate(self.types):
            prefix = f"{self.prefix}layers.{index}."
            norm = self.norm(tensors, f"{prefix}input_layernorm", self.hidden)
            if kind == "linear_attention":
                blocks.append(ResidualPart(norm, self._delta_net(tensors, parts, prefix, states)))
                states += 1
            else:
                attention = self._attention(tensors, parts, prefix, attentions)
                blocks.append(ResidualPart(norm, attention))
                attentions += 1
            norm = self.norm(tensors, f"{prefix}post_attention_layernorm", self.hidden)
            sparse = self.experts is not None and self.experts.sparse[index]
            make = self._mixture if sparse else self._mlp
            layer = FeedForwardLayer(make(tensors, parts, prefix), index)
            blocks.append(ResidualPart(norm, layer))
        window = conv_state(self.delta.channels, self.window, parts.dtype)
        norm = self.norm(tensors, f"{self.prefix}norm", self.hidden)
        tensors_of_state = (window, self.delta.state)
        return self.decoder(tensors, blocks, norm, attentions, states, tensors_of_state)

    def norm(self, tensors: Tensors, name: str, width: int) -> torch.Tensor:
        """A norm's weights; 1 is added to the stored ones, in float32."""
        return tensors.tensor(f"{name}.weight", width).float() + 1.0

    def build_head(
        self, tensors: Tensors, parts: Parts, decoder: HybridWeights
    ) -> HybridMTPWeights:
        prefix, hidden = f"{MTP}layers.0.", self.hidden
        make = self._mlp if self.experts is None else self._mixture
        return HybridMTPWeights(
            embedding=decoder.embedding,
            embedding_norm=self.norm(tensors, f"{MTP}pre_fc_norm_embedding", hidden),
            hidden_norm=self.norm(tensors, f"{MTP}pre_fc_norm_hidden", hidden),
            projection=tensors.linear({f"{MTP}fc": hidden}, 2 * hidden),
            attention=ResidualPart(
                self.norm(tensors, f"{prefix}input_layernorm", hidden),
                self._attention(tensors, parts, prefix, 0),
            ),
            feed_forward=ResidualPart(
                self.norm(tensors, f"{prefix}post_attention_layernorm", hidden),
                FeedForwardLayer(make(tensors, parts, prefix)),
            ),
            norm=self.norm(tensors, f"{MTP}norm", hidden),
            lm_head=decoder.lm_head,
            eps=self.eps,
            kv_shape=self.kv_shape,
        )

    def projections(self, tensors: Tensors, prefix: str) -> DeltaProjections:
        """The products before a gated delta net."""
        shape = self.delta
        joint, twice = shape.channels + shape.value_width, 2 * shape.value_heads
        return JointProjections(
            qkvz=tensors.linear({f"{prefix}in_proj_qkvz": joint}, self.hidden),
            ba=tensors.linear({f"{prefix}in_proj_ba": twice}, self.hidden, exact=True),
            shape=shape,
        )

    def _delta_net(
        self, tensors: Tensors, parts: Parts, prefix: str, index: int
    ) -> GatedDeltaLayer:
        shape, prefix = self.delta, f"{prefix}linear_attn."
        heads, channels = shape.value_heads, shape.channels
        dt_bias = tensors.float32(f"{prefix}dt_bias", heads)
        a_log = tensors.float32(f"{prefix}A_log", heads)
        weight = tensors.tensor(f"{prefix}conv1d.weight", channels, 1, self.window)
        weights = DeltaWeights(
            convolution=Convolution(weight[:, 0], None),
            a_log=a_log,
            dt_bias=dt_bias,
            norm=tensors.tensor(f"{prefix}norm.weight", shape.value_dim),
            eps=self.eps,
            shape=shape,
        )
        return GatedDeltaLayer(
            index=index,
            projections=self.projections(tensors, prefix),
            delta=recurrences_of(parts.ops).gated_delta(weights),
            output=tensors.linear({f"{prefix}out_proj": self.hidden}, shape.value_width),
        )

    def _attention(self, tensors: Tensors, parts: Parts, prefix: str, index: int) -> AttentionLayer:
        prefix, dim = f"{prefix}self_attn.", self.head_dim
        norm = QKNorm(
            query=self.norm(tensors, f"{prefix}q_norm", dim).to(parts.dtype),
            key=self.norm(tensors, f"{prefix}k_norm", dim).to(parts.dtype),
        )
        return self.attention(
            tensors, parts, prefix, index, scale=dim**-0.5, norm=norm, bias=self.bias, gated=True
        )

    def _mlp(self, tensors: Tensors, parts: Parts, prefix: str) -> FeedForward:
        return self.gated_mlp(tensors, parts, f"{prefix}mlp.", self.inner)

    def _mixture(self, tensors: Tensors, parts: Parts, prefix: str) -> FeedForward:
        experts, prefix = self.experts, f"{prefix}mlp."
        assert experts is not None and experts.shared_size is not None
        router = tensors.linear({f"{prefix}gate": experts.count}, self.hidden, exact=True)
        shared = f"{prefix}shared_expert"
        expert = SharedExpert(
            mlp=self.gated_mlp(tensors, parts, f"{shared}.", experts.shared_size),
            gate=tensors.linear({f"{shared}_gate": 1}, self.hidden, exact=True),
        )
        below = f"{prefix}experts."
        return self.mixture(tensors, parts, below, router, experts, shared=expert)


@dataclass(frozen=True, slots=True)
class JointProjections:
    """Qwen3-Next's: the rows of each key head are its query, key, and the values and gates of its
    value heads; then its betas and decays."""

    qkvz: Linear
    ba: Linear
    shape: DeltaShape

    def __call__(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        shape, rows = self.shape, len(x)
        values = shape.value_width // shape.key_heads
        joint = self.qkvz(x).view(rows, shape.key_heads, -1)
        widths = [shape.key_dim, shape.key_dim, values, values]
        query, key, value, gate = torch.split(joint, widths, dim=-1)
        beta, decay = self.ba(x).view(rows, shape.key_heads, -1).chunk(2, dim=-1)
        mixed = torch.cat([part.flatten(1) for part in (query, key, value)], dim=-1)
        gates = gate.reshape(rows, shape.value_heads, shape.value_dim)
        return mixed, gates, beta.flatten(1), decay.flatten(1)
