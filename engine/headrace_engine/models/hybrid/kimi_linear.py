"""Kimi Linear: Kimi Delta Attention, latent attention without positions, mixtures of experts."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Self

import torch

from ...checkpoints.architectures import Architecture
from ...checkpoints.config import ExpertsConfig, LatentConfig
from ...checkpoints.fields import Fields
from ...checkpoints.rope import RopeConfig
from ...checkpoints.tensor_files import Shape
from ...core.attention_backend import LayerParams, latent_backend
from ...layers.feed_forward import FeedForward, SharedExpert
from ...layers.layers import Linear
from ...operators.recurrent import (
    Convolution,
    DeltaShape,
    DeltaWeights,
    GatedDelta,
    conv_state,
    recurrences_of,
)
from ..base import KVShape
from ..decoder.latent import LatentAttention, LatentWeights, divide_heads
from ..decoder.positions import LayerPositions
from ..parallel import Shard
from .decoder import HybridWeights, ResidualPart
from .family import Family, MatrixNames, Parts, layer_types
from .layers import FeedForwardLayer, HybridLayer, HybridStep
from .ranks import Division
from .tensors import Tensors

_EXPERTS = MatrixNames("w1", "w3", "w2")
# What ranks divide by the heads.
_BY_HEAD = (
    *("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"),
    *("q_conv1d", "k_conv1d", "v_conv1d", "dt_bias", "f_b_proj", "g_b_proj", "b_proj"),
)
# Names of config.json, and transformers' names for them.
_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


class KimiLinear(Family):
    """The shape of one checkpoint. Raises ConfigError for fields that are not supported."""

    architecture = Architecture(rms_norm_eps=1e-5, max_position_embeddings=1_048_576)
    experts: ExpertsConfig
    # The name of MLPs in published checkpoints; transformers may save another one.
    _mlp_name = "mlp"

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        fields.require("hidden_act", ("silu", "swish"), default="silu")
        fields.require("attention_bias", (False,), default=False)
        fields.require("mla_use_nope", (True,), default=True)
        fields.require("moe_layer_freq", (1,), default=1)
        fields.require("moe_router_activation_func", ("sigmoid",), default="sigmoid")
        self.positions = fields.integer(_name(fields, "model_max_length"), self.positions)
        self.heads = fields.integer("num_attention_heads", 32)
        self.latent = LatentConfig(
            rank=fields.integer("kv_lora_rank", 512),
            rotary=fields.integer("qk_rope_head_dim", 64),
            plain=fields.integer("qk_nope_head_dim", 128),
            value=fields.integer("v_head_dim", 128),
            query_rank=fields.optional_integer("q_lora_rank", None),
        )
        self.kv_heads, self.head_dim = 1, self.latent.rotary
        self.eps = fields.number("rms_norm_eps", 1e-5)
        self.tied = fields.flag("tie_word_embeddings")
        self.inner = fields.integer("intermediate_size", 9216)
        linear = Fields(fields.path, fields.object("linear_attn_config"), "linear_attn_config.")
        heads = linear.integer("num_heads", fields.integer("linear_num_heads", 32))
        width = linear.integer("head_dim", fields.integer("linear_head_dim", 128))
        window = fields.integer("linear_conv_kernel_dim", 4)
        self.window = linear.integer("short_conv_kernel_size", window)
        self.delta = DeltaShape(heads, heads, width, width)
        kinds = ("linear_attention", "full_attention")
        self.types = layer_types(fields, kinds, _usual_types(linear, self.layers))
        self.experts = self._experts()

    def look_at(self, stored: Collection[str]) -> None:
        super().look_at(stored)
        if any(".block_sparse_moe.gate_proj." in name for name in stored):
            self._mlp_name = "block_sparse_moe"

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(1, self.latent.width, self.latent.rank)

    def rope(self) -> RopeConfig | None:
        return None

    def _experts(self) -> ExpertsConfig:
        fields = self.fields
        counted, grouped = _name(fields, "num_experts"), _name(fields, "num_expert_group")
        chosen = _name(fields, "num_experts_per_token")
        inner = fields.integer("moe_intermediate_size", 1024)
        dense = fields.count("first_k_dense_replace", 1)
        usual = ["dense" if index < dense else "sparse" for index in range(self.layers)]
        kinds = fields.get("mlp_layer_types", usual)
        if not isinstance(kinds, list) or len(kinds) != self.layers:
            raise fields.error("mlp_layer_types", f"a list of {self.layers} names")
        if not set(kinds) <= {"dense", "sparse"}:
            raise fields.error("mlp_layer_types", "made of dense and sparse")
        found = ExpertsConfig(
            count=fields.integer(counted, 256),
            per_token=fields.integer(chosen, 8),
            intermediate_size=inner,
            renormalise=fields.flag(_name(fields, "moe_renormalize"), True),
            shared_size=inner * fields.integer(_name(fields, "num_shared_experts"), 1),
            sparse=tuple(kind == "sparse" for kind in kinds),
            sigmoid=True,
            correction=True,
            groups=fields.integer(grouped, 1),
            kept_groups=fields.integer("topk_group", 1),
            group_best=2,
            factor=fields.number("routed_scaling_factor", 2.446),
            shared_gate=False,
        )
        if found.count % found.groups or found.count < 2 * found.groups:
            raise fields.error(grouped, f"a divisor of {counted} ({found.count}), with two in each")
        if found.kept_groups > found.groups:
            raise fields.error("topk_group", f"at most {grouped} ({found.groups})")
        if found.per_token > found.count // found.groups * found.kept_groups:
            raise fields.error(chosen, "at most the experts of topk_group groups")
        return found

    def counts(self) -> dict[str, int]:
        return {**super().counts(), "linear_attn_config.num_heads": self.delta.value_heads}

    def inner_sizes(self) -> dict[str, int]:
        return {} if all(self.experts.sparse) else {"intermediate_size": self.inner}

    def divided(self, shard: Shard) -> Self:
        part, heads = super().divided(shard), self.delta.value_heads // shard.size
        part.inner = shard.inner_size(self.inner)
        part.delta = replace(self.delta, key_heads=heads, value_heads=heads)
        return part

    def division(self, name: str, whole: Shape) -> Division | None:
        """Latents, and what low-rank products have inside, each rank has all of."""
        if name.endswith(".A_log"):
            return Division(2, (whole[2],))
        named = name.removesuffix(".weight").rpartition(".")[2]
        return Division(0, (whole[0],)) if named in _BY_HEAD else super().division(name, whole)

    def build(self, tensors: Tensors, parts: Parts) -> HybridWeights:
        blocks: list[ResidualPart] = []
        attentions = states = 0
        layer: HybridLayer
        for index, kind in enumerate(self.types):
            prefix = f"{self.prefix}layers.{index}."
            norm = tensors.tensor(f"{prefix}input_layernorm.weight", self.hidden)
            if kind == "linear_attention":
                layer = self._delta_attention(tensors, parts, f"{prefix}self_attn.", states)
                states += 1
            else:
                layer = self._attention(tensors, parts, f"{prefix}self_attn.", attentions)
                attentions += 1
            blocks.append(ResidualPart(norm, layer))
            norm = tensors.tensor(f"{prefix}post_attention_layernorm.weight", self.hidden)
            make = self._mixture if self.experts.sparse[index] else self._mlp
            layer = FeedForwardLayer(make(tensors, parts, prefix), index)
            blocks.append(ResidualPart(norm, layer))
        norm = tensors.tensor(f"{self.prefix}norm.weight", self.hidden)
        state = (conv_state(self.delta.channels, self.window, parts.dtype), self.delta.state)
        return self.decoder(tensors, blocks, norm, attentions, states, state)

    def _delta_attention(
        self, tensors: Tensors, parts: Parts, prefix: str, index: int
    ) -> "KimiDeltaLayer":
        shape, hidden, window = self.delta, self.hidden, self.window
        heads, width = shape.value_heads, shape.value_width
        qkv = tensors.linear({f"{prefix}{name}_proj": width for name in "qkv"}, hidden)
        names = [f"{prefix}{name}_conv1d.weight" for name in "qkv"]
        weights = [tensors.tensor(name, width, 1, window)[:, 0] for name in names]
        a_log = tensors.float32(f"{prefix}A_log", 1, 1, heads, 1)
        dt_bias = tensors.float32(f"{prefix}dt_bias", width)
        decay, gate = (
            LowRank(
                tensors.linear({f"{prefix}{name}_a_proj": shape.value_dim}, hidden, exact=True),
                tensors.linear({f"{prefix}{name}_b_proj": width}, shape.value_dim, exact=True),
            )
            for name in ("f", "g")
        )
        delta = DeltaWeights(
            convolution=Convolution(torch.cat(weights), None),
            a_log=a_log.view(heads),
            dt_bias=dt_bias.view(heads, shape.value_dim),
            norm=tensors.tensor(f"{prefix}o_norm.weight", shape.value_dim),
            eps=self.eps,
            shape=shape,
        )
        return KimiDeltaLayer(
            index=index,
            qkv=qkv,
            decay=decay,
            gate=gate,
            beta=tensors.linear({f"{prefix}b_proj": heads}, hidden, exact=True),
            delta=recurrences_of(parts.ops).gated_delta(delta),
            output=tensors.linear({f"{prefix}o_proj": hidden}, width),
            shape=shape,
        )

    def _attention(
        self, tensors: Tensors, parts: Parts, prefix: str, index: int
    ) -> "LatentAttentionLayer":
        latent, hidden, rank = self.latent, self.hidden, self.latent.query_rank
        queries = self.heads * latent.query_width
        first = {"q_proj": queries} if rank is None else {"q_a_proj": rank}
        named = {f"{prefix}{name}": width for name, width in first.items()}
        named[f"{prefix}kv_a_proj_with_mqa"] = latent.width
        product, query, query_norm = tensors.linear(named, hidden), None, None
        if rank is not None:
            query_norm = tensors.tensor(f"{prefix}q_a_layernorm.weight", rank)
            query = tensors.linear({f"{prefix}q_b_proj": queries}, rank)
        norm = tensors.tensor(f"{prefix}kv_a_layernorm.weight", latent.rank)
        expanded = self.heads * (latent.plain + latent.value)
        both = tensors.tensor(f"{prefix}kv_b_proj.weight", expanded, latent.rank)
        keys, values = divide_heads(latent, both)
        return LatentAttentionLayer(
            index=index,
            product=product,
            weights=LatentWeights(
                config=latent,
                query=query,
                query_norm=query_norm,
                norm=norm,
                keys=keys.contiguous(),
                values=values.transpose(1, 2).contiguous(),
            ),
            output=tensors.linear({f"{prefix}o_proj": hidden}, self.heads * latent.value),
            params=LayerParams(scale=float(latent.query_width**-0.5)),
            attention=LatentAttention(parts.ops, latent_backend(parts.attention), False),
        )

    def _mlp(self, tensors: Tensors, parts: Parts, prefix: str) -> FeedForward:
        return self.gated_mlp(tensors, parts, f"{prefix}{self._mlp_name}.", self.inner)

    def _mixture(self, tensors: Tensors, parts: Parts, prefix: str) -> FeedForward:
        experts, prefix = self.experts, f"{prefix}block_sparse_moe."
        assert experts.shared_size is not None
        router = tensors.linear({f"{prefix}gate": experts.count}, self.hidden, exact=True)
        correction = tensors.float32(f"{prefix}gate.e_score_correction_bias", experts.count)
        shared = self.gated_mlp(tensors, parts, f"{prefix}shared_experts.", experts.shared_size)
        return self.mixture(
            tensors, parts, f"{prefix}experts.", router, experts, _EXPERTS,
            shared=SharedExpert(shared, None), correction=correction,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LowRank:
    """The product of two matrices."""

    down: Linear
    up: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x))


@dataclass(frozen=True, slots=True)
class KimiDeltaLayer:
    """Kimi Delta Attention (https://arxiv.org/abs/2510.26692): a gated delta net in which each
    channel of a key has its own decay."""

    index: int
    qkv: Linear
    decay: Linear
    gate: Linear
    beta: Linear
    delta: GatedDelta
    output: Linear
    shape: DeltaShape

    def __call__(self, x: torch.Tensor, step: HybridStep) -> torch.Tensor:
        gate = self.gate(x).view(len(x), self.shape.value_heads, self.shape.value_dim)
        rows = (self.qkv(x), gate, self.beta(x), self.decay(x))
        return self.output(self.delta(*rows, self.index, step.memory))


@dataclass(frozen=True, slots=True)
class LatentAttentionLayer:
    """Attention over latents, number `index` of the layers with KV."""

    index: int
    product: Linear
    weights: LatentWeights
    output: Linear
    params: LayerParams
    attention: LatentAttention

    def __call__(self, x: torch.Tensor, step: HybridStep) -> torch.Tensor:
        attended = self.attention(
            self.weights,
            x,
            self.product(x),
            LayerPositions(step.cos, step.sin, None),
            step.caches[self.index],
            step.batch.metadata_of(self.index),
            self.params,
            None,
        )
        return self.output(attended)


def _name(fields: Fields, published: str) -> str:
    """The name of a field in this config.json: the published one, or that of transformers."""
    usual = _NAMES[published]
    return usual if usual in fields and published not in fields else published


def _usual_types(linear: Fields, layers: int) -> list[str]:
    """The kinds of the layers if layer_types is absent. Lists of layers count from 1."""
    if "full_attn_layers" not in linear:
        full = {index + 1 for index in range(layers) if index and index % 4 == 0}
    else:
        listed = linear.get("full_attn_layers", [])
        if not isinstance(listed, list):
            raise linear.error("full_attn_layers", "a list of layers")
        full = set(listed)
    kinds = ("linear_attention", "full_attention")
    return [kinds[index + 1 in full] for index in range(layers)]
