"""What the families of hybrid decoders have in common: fields of config.json, and the vocabulary's
tensors."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from ...attention.reference import ReferenceBackend
from ...checkpoints.architectures import Architecture
from ...checkpoints.config import ExpertsConfig
from ...checkpoints.fields import Fields
from ...checkpoints.rope import RopeConfig, read_rope
from ...checkpoints.tensor_files import Shape
from ...core.attention_backend import AttentionBackend, LayerParams
from ...core.recurrent_state import StateTensor
from ...layers.expert_weights import MixtureOps, MixtureParts
from ...layers.feed_forward import FeedForward, GatedMLP, SharedExpert, SparseMoe
from ...layers.layers import Linear
from ...operators.base import HeadShape, Ops, QKNorm, TorchOps
from ..base import KVShape
from ..context import pick_context
from ..parallel import (
    Shard,
    check_counts,
    experts_to_spread,
    shard_experts,
    shared_counts,
)
from ..rotary.rotary import RotaryTable
from .decoder import HybridWeights, ResidualPart
from .layers import AttentionLayer
from .mtp import HybridMTPWeights
from .ranks import Division, SharedHeads
from .tensors import ExpectedTensors, Tensors

HEAD = "lm_head.weight"
# The prefix of a multimodal model's decoder.
TEXT_PART = "model.language_model."


@dataclass(frozen=True, slots=True)
class Parts:
    """What layers compute with."""

    attention: AttentionBackend
    ops: Ops
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class MatrixNames:
    """The names of a gated MLP's matrices."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class Family(ABC):
    """The shape of one checkpoint, read from its config.json. The names of the decoder's tensors
    begin with `prefix`. `layers` replaces num_hidden_layers."""

    architecture: ClassVar[Architecture]
    # What the names of the decoder's tensors may begin with.
    prefixes: ClassVar[tuple[str, ...]] = (TEXT_PART, "model.")
    # Whether checkpoints may have a layer that predicts further tokens.
    has_head: ClassVar[bool] = False
    # The name of the embedding, after the prefix.
    embedding: ClassVar[str] = "embed_tokens"
    # How names of tensors with all experts of a mixture end.
    stacked_experts: ClassVar[tuple[str, ...]] = (
        *(".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj"),
    )
    # The name in config.json of the experts' inner size.
    expert_size: ClassVar[str] = "moe_intermediate_size"
    # The rank whose part this is; None: it is the whole decoder.
    shard: Shard | None = None
    # The mixture; None: there is none.
    experts: ExpertsConfig | None = None
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool

    def __init__(self, fields: Fields, layers: int | None = None) -> None:
        self.fields = fields
        self.prefix = self.prefixes[-1]
        self.hidden = fields.integer("hidden_size")
        self.vocab = fields.integer("vocab_size")
        self.layers = fields.integer("num_hidden_layers") if layers is None else layers
        longest = self.architecture.max_position_embeddings
        self.positions = fields.integer("max_position_embeddings", longest)

    def read_heads(self) -> None:
        """Reads the heads of attention; without a number of KV heads each head has its own."""
        self.heads = self.fields.integer("num_attention_heads", 32)
        kv_heads = self.fields.optional_integer("num_key_value_heads", 8)
        self.kv_heads = self.heads if kv_heads is None else kv_heads
        self.head_dim = self.fields.integer("head_dim", self.hidden // self.heads)

    def look_at(self, stored: Collection[str]) -> None:
        """Reads what config.json does not say from the names of a checkpoint's tensors."""
        for prefix in self.prefixes:
            if any(name.startswith(prefix) for name in stored):
                self.prefix = prefix
                break
        if self.prefix == TEXT_PART:
            # A multimodal config.json may contradict itself; the files are right.
            self.tied = HEAD not in stored

    @property
    def kv_shape(self) -> KVShape:
        """The shape of a layer's KV."""
        return KVShape(self.kv_heads, self.head_dim)

    def rope(self) -> RopeConfig | None:
        """The rotary embedding; None if there is none."""
        return read_rope(self.fields, self.architecture, self.head_dim, self.positions)

    def context(self, wanted: int | None) -> int:
        """The longest context to serve (see pick_context)."""
        rope = self.rope()
        kind, parameters = ("default", {}) if rope is None else (rope.rope_type, rope.parameters)
        return pick_context(wanted, self.positions, kind, parameters)

    def rotary(self, length: int, device: torch.device) -> RotaryTable:
        """Rotations of the positions below `length`."""
        rope = self.rope()
        if rope is None:
            return RotaryTable.unrotated(self.head_dim, length, device)
        return RotaryTable(rope, self.head_dim, self.positions, length, device)

    def check_ranks(self, size: int, expert_parallel: bool) -> None:
        """Raises ConfigError if `size` ranks cannot share the decoder."""
        inner, experts = self.inner_sizes(), self.experts
        if expert_parallel:
            experts = experts_to_spread(experts, size)
        elif experts is not None:
            inner[self.expert_size] = experts.intermediate_size
        if experts is not None:
            inner |= shared_counts(experts)
        check_counts(size, self.counts(), inner, self.shared_heads().items(), self.vocab)

    def counts(self) -> dict[str, int]:
        """What ranks divide equally, by its name in config.json."""
        return {"num_attention_heads": self.heads}

    def shared_heads(self) -> dict[str, int]:
        """Numbers of heads of which several ranks may have the same one, by their names in
        config.json."""
        return {"num_key_value_heads": self.kv_heads}

    def inner_sizes(self) -> dict[str, int]:
        """The inner sizes of dense MLPs, by their names in config.json."""
        return {}

    def divided(self, shard: Shard) -> Self:
        """The shape of one rank's part; the vocabulary stays whole."""
        part = copy(self)
        part.shard = shard
        part.heads = self.heads // shard.size
        part.kv_heads = max(1, self.kv_heads // shard.size)
        part.experts = None if self.experts is None else shard_experts(self.experts, shard)
        return part

    def division(self, name: str, whole: Shape) -> Division | None:
        """How ranks divide a tensor; None: each of them has all of it."""
        if name in (f"{self.prefix}{self.embedding}.weight", HEAD):
            return Division(0, (whole[0],))
        module, _, kind = name.rpartition(".")
        last = module.rpartition(".")[2]
        if last in ("k_proj", "v_proj"):
            return Division(0, (SharedHeads(self.kv_heads, whole[0] // self.kv_heads),))
        if last == "q_proj":
            return Division(0, (whole[0],))
        if last in ("gate_proj", "up_proj", "w1", "w3"):
            return Division(0, (whole[0],), "inner")
        if last in ("o_proj", "out_proj", "down_proj", "w2"):
            if kind == "bias":
                return Division(0, (), "once")
            return Division(1, (whole[1],), "even" if last in ("o_proj", "out_proj") else "inner")
        if name.endswith(".experts.gate_up_proj"):
            return Division(1, (whole[1] // 2,) * 2, "inner")
        if name.endswith(".experts.up_proj"):
            return Division(1, (whole[1],), "inner")
        if name.endswith(".experts.down_proj"):
            return Division(2, (whole[2],), "inner")
        return None

    @abstractmethod
    def build(self, tensors: Tensors, parts: Parts) -> HybridWeights:
        """Asks `tensors` for all tensors of the checkpoint, and makes the decoder's weights."""

    def build_head(
        self, tensors: Tensors, parts: Parts, decoder: HybridWeights
    ) -> HybridMTPWeights:
        """Asks `tensors` for those of the layer that predicts further tokens, and makes its
        weights. Called only if the family `has_head`."""
        raise NotImplementedError(type(self).__name__)

    def shape(self, dtype: torch.dtype) -> HybridWeights:
        """The decoder with weights that take no memory: for the shapes of its KV and states."""
        backend = ReferenceBackend()
        return self.build(ExpectedTensors(dtype), Parts(backend, TorchOps(), dtype))

    def decoder(
        self,
        tensors: Tensors,
        parts: Sequence[ResidualPart],
        norm: torch.Tensor,
        attentions: int,
        states: int,
        state_tensors: tuple[StateTensor, ...],
        *,
        embedding_scale: float = 1.0,
        logits_divisor: float = 1.0,
    ) -> HybridWeights:
        """The weights of a decoder of `parts`, of which `attentions` have KV and `states` a state.
        `norm` is the last one."""
        name = f"{self.prefix}{self.embedding}"
        return HybridWeights(
            embedding=tensors.tensor(f"{name}.weight", self.vocab, self.hidden),
            parts=parts,
            norm=norm,
            lm_head=tensors.linear({name if self.tied else "lm_head": self.vocab}, self.hidden),
            eps=self.eps,
            kv_shapes=(self.kv_shape,) * attentions,
            state_tensors=state_tensors,
            num_state_layers=states,
            embedding_scale=embedding_scale,
            logits_divisor=logits_divisor,
        )

    def attention(
        self,
        tensors: Tensors,
        parts: Parts,
        prefix: str,
        index: int,
        *,
        scale: float,
        norm: QKNorm | None = None,
        bias: bool = False,
        gated: bool = False,
        output: str = "o_proj",
    ) -> AttentionLayer:
        """The attention whose tensors' names begin with `prefix`, number `index` of its kind.
        `output` is the name of its last matrix. With `gated` its query has a gate for each
        element."""
        hidden, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        return AttentionLayer(
            index=index,
            query=tensors.linear({f"{prefix}q_proj": (1 + gated) * q}, hidden, bias),
            key_value=tensors.linear({f"{prefix}k_proj": kv, f"{prefix}v_proj": kv}, hidden, bias),
            output=tensors.linear({f"{prefix}{output}": hidden}, q, bias),
            heads=HeadShape(self.heads, self.kv_heads, self.head_dim, self.eps),
            norm=norm,
            params=LayerParams(scale=scale),
            attention=parts.attention,
            ops=parts.ops,
            gated=gated,
        )

    def gated_mlp(
        self,
        tensors: Tensors,
        parts: Parts,
        prefix: str,
        inner: int,
        names: MatrixNames = MatrixNames(),
        *,
        bias: bool = False,
    ) -> GatedMLP:
        """The MLP whose matrices' names begin with `prefix`."""
        gates = {f"{prefix}{names.gate}": inner, f"{prefix}{names.up}": inner}
        gate_up = tensors.linear(gates, self.hidden, bias)
        down = tensors.linear({f"{prefix}{names.down}": self.hidden}, inner, bias)
        return GatedMLP(gate_up, down, parts.ops.silu_mul)

    def gated_experts(
        self,
        tensors: Tensors,
        parts: Parts,
        prefix: str,
        experts: ExpertsConfig,
        names: MatrixNames = MatrixNames(),
    ) -> list[GatedMLP]:
        """The MLPs of a mixture, whose matrices' names begin with `prefix` and their number."""
        inner = experts.intermediate_size
        gates = {names.gate: inner, names.up: inner}
        gate_ups = tensors.experts(prefix, experts, "gate_up_proj", gates, self.hidden)
        downs = tensors.experts(prefix, experts, "down_proj", {names.down: self.hidden}, inner)
        both = zip(gate_ups, downs, strict=True)
        return [GatedMLP(gate_up, down, parts.ops.silu_mul) for gate_up, down in both]

    def mixture(
        self,
        tensors: Tensors,
        parts: Parts,
        prefix: str,
        router: Linear,
        experts: ExpertsConfig,
        names: MatrixNames = MatrixNames(),
        *,
        shared: SharedExpert | None = None,
        correction: torch.Tensor | None = None,
    ) -> FeedForward:
        """A mixture of gated MLPs, whose matrices' names begin with `prefix`: of all experts at
        once, if the operators can."""
        if isinstance(parts.ops, MixtureOps):
            stacked, matrices = (
                ("gate_up_proj", "down_proj"),
                ((names.gate, names.up), (names.down,)),
            )
            weights = tensors.grouped(prefix, experts, stacked, matrices)
            if weights is not None:
                own = MixtureParts(router, weights, shared, experts, correction=correction)
                return parts.ops.mixture(own)
        mlps = self.gated_experts(tensors, parts, prefix, experts, names)
        return SparseMoe(router, mlps, shared, experts, correction)


def layer_types(
    fields: Fields, known: tuple[str, ...], default: Sequence[str], others: tuple[str, ...] = ()
) -> list[str]:
    """The kind of each layer: each one of `known` at least once, and any of `others`."""
    kinds, names = fields.get("layer_types", default), (*known, *others)
    if not isinstance(kinds, list) or len(kinds) != len(default) or not set(kinds) <= set(names):
        raise fields.error("layer_types", f"a list of {len(default)} names: {', '.join(names)}")
    for kind in known:
        if kind not in kinds:
            raise fields.error("layer_types", f"with at least one {kind}")
    return kinds
