"""A native decoder's configuration, read from the config.json of a checkpoint.

Defaults for absent fields are those of transformers' config classes. A value that the native
decoder does not support raises ConfigError with file and field; it is never ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from .architectures import (
    ARCHITECTURES,
    MULTIMODAL,
    Architecture,
    Latents,
    Mixture,
    Sinks,
    TensorLayout,
)
from .checkpoint import Checkpoint
from .fields import Fields
from .rope import (
    QueryScaling,
    RopeConfig,
    read_local_rope,
    read_query_scaling,
    read_rope,
    yarn_mscale,
)

__all__ = ["ARCHITECTURES", "ExpertsConfig", "ModelConfig", "RopeConfig"]

Activation = Literal["silu", "gelu_tanh"]
# The native kernels keep the scores of this many groups of experts.
MAX_EXPERT_GROUPS = 64


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """(up + 1) * gate * sigmoid(alpha * gate), with gates at most `limit` and ups within
    +-`limit`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts instead of the MLP, in the layers whose entry of `sparse` is true.

    `per_token` experts of `count` compute each token. Their weights are the softmax over all, or
    with `sigmoid` each logit's logistic function; divided by their sum if `renormalise`, and times
    `factor`. With `correction` a stored bias is added to the scores that choose. Only the
    `kept_groups` best of `groups` groups are chosen from; a group's score is the sum of its
    `group_best` best ones. `shared_size` is the inner size of an expert that computes every token,
    or None; `shared_gate`: a stored vector gates it. With `bias` router and experts have biases;
    `swiglu` is their activation if it differs from the model's. With `scaled_inputs` an expert
    computes its weight times the row, and results are added as they are (Llama 4).

    The router also chooses from `zero` experts after the others, which return the row that they
    read. With `shortcut` no layer has a mixture instead of its MLP. Instead every even layer has
    one beside it, which reads the same row, and whose result is added to that of the next layer
    (LongCat-Flash, https://arxiv.org/abs/2509.01322).

    `local_range` are the experts [start, stop) whose weights are in this process; None: all.
    """

    count: int
    per_token: int
    intermediate_size: int
    renormalise: bool
    shared_size: int | None
    sparse: tuple[bool, ...]
    bias: bool = False
    swiglu: ClampedSwiGLU | None = None
    sigmoid: bool = False
    correction: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 1
    factor: float = 1.0
    shared_gate: bool = True
    scaled_inputs: bool = False
    zero: int = 0
    shortcut: bool = False
    local_range: tuple[int, int] | None = None

    @property
    def local(self) -> range:
        """The experts whose weights are in this process."""
        return range(*(self.local_range or (0, self.count)))

    @property
    def choices(self) -> int:
        """The number of experts that the router chooses from."""
        return self.count + self.zero

    @property
    def is_plain(self) -> bool:
        """Whether experts are chosen and weighted by the softmax of their logits alone."""
        return not (self.sigmoid or self.correction or self.groups > 1 or self.factor != 1.0)


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """An indexer, which chooses the keys that a position attends to: DeepSeek Sparse Attention
    (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).

    A key's score is the sum over `heads` of their products with the key, those below 0 being 0,
    each times a weight of the position. The cache has one key of `width` elements for each
    position. Each position attends to the `kept` keys with the best scores. The rotation of these
    keys and queries pairs neighbours if `interleaved`. The layers in `shared` have no indexer: they
    attend to the keys that the layer before them attends to.
    """

    heads: int
    width: int
    kept: int
    interleaved: bool
    shared: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Attention over latents: MLA (DeepSeek-V2, https://arxiv.org/abs/2405.04434).

    The cache has a latent of `rank` elements for each position, from which the keys and values of
    all heads are made, and a rotated key of `rotary` elements that all heads share. A head's query
    and key have `plain` elements more, its values have `value`. Queries are made from `query_rank`
    elements, or from the hidden state. With `index` a position attends to few of the latents.
    Queries are multiplied by `query_factor`, latents by `factor`.
    """

    rank: int
    rotary: int
    plain: int
    value: int
    query_rank: int | None
    index: IndexConfig | None = None
    query_factor: float = 1.0
    factor: float = 1.0

    @property
    def width(self) -> int:
        """Elements of a position in the cache."""
        return self.rank + self.rotary

    @property
    def query_width(self) -> int:
        """Elements of a head's query."""
        return self.plain + self.rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's shape.

    `windows` has one entry for each layer: the number of keys that a position sees, including its
    own, or None if it sees all; with `chunked` only those since the last multiple of that number.
    `local_rope` rotates layers with a window; `unrotated` layers are not rotated. `scale`
    multiplies attention scores, `embedding_scale` embeddings, rounded to their dtype if
    `rounds_embedding_scale`; logits are divided by `logits_divisor`. With `offset_norms` norms
    multiply by 1 + weight; `input_norms` are before attention and MLP, `output_norms` after them.
    With `wide_qk_norm` those of Q and K cover all heads together; with `rotated_qk_norm` those come
    after the rotation; with `unit_qk_norm` rotated layers have such norms without weights. In the
    layers that `sinks` names each head's softmax includes a sink logit. Layers with a window have
    `window_kv_heads` KV heads; None: as many as the others. A head's values have `value_dim`
    elements, times `value_scale`; None: as many as keys. With `latent`, the cache has one KV head
    of that width; values are its first elements. A `multimodal` checkpoint has other parts
    beside the decoder. `kv_scales` has an entry for each layer, read from
    the weights. The checkpoint has `draft_layers` more layers, which are not read.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    scale: float
    chunked: bool = False
    local_rope: RopeConfig | None = None
    unrotated: frozenset[int] = frozenset()
    interleaved: bool = False
    query_scaling: QueryScaling | None = None
    layout: TensorLayout = "llama"
    multimodal: bool = False
    activation: Activation = "silu"
    embedding_scale: float | None = None
    rounds_embedding_scale: bool = False
    offset_norms: bool = False
    input_norms: bool = True
    output_norms: bool = False
    wide_qk_norm: bool = False
    rotated_qk_norm: bool = False
    unit_qk_norm: bool = False
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    logits_divisor: float | None = None
    experts: ExpertsConfig | None = None
    sinks: Sinks = "none"
    window_kv_heads: int | None = None
    value_dim: int | None = None
    value_scale: float | None = None
    kv_scales: tuple[tuple[float, float], ...] | None = None
    draft_layers: int = 0
    latent: LatentConfig | None = None

    @property
    def rotary_dim(self) -> int:
        """The number of elements of a head that the rotary embedding has angles for."""
        return self.head_dim if self.latent is None else self.latent.rotary

    @property
    def value_width(self) -> int:
        """Elements of a head's values; the cache keeps them as wide as keys."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def has_equal_heads(self) -> bool:
        """Whether all layers have as many KV heads, and values are as wide as keys."""
        return self.window_kv_heads is None and self.value_dim is None

    def index_of(self, layer: int) -> IndexConfig | None:
        """The layer's indexer; None if it has none."""
        index = None if self.latent is None else self.latent.index
        return None if index is None or layer in index.shared else index

    def has_shortcut(self, layer: int) -> bool:
        """Whether a mixture lies beside the layer and the next one."""
        return self.experts is not None and self.experts.shortcut and layer % 2 == 0

    def kv_heads(self, layer: int) -> int:
        """The number of KV heads of a layer."""
        if self.window_kv_heads is None or self.windows[layer] is None:
            return self.num_kv_heads
        return self.window_kv_heads

    def has_sinks(self, layer: int) -> bool:
        """Whether the softmax of the layer's heads includes a sink."""
        return self.sinks == "all" or (self.sinks == "windows" and self.windows[layer] is not None)

    def cached_elements(self, layer: int) -> int:
        """Elements that a layer caches for a position."""
        if self.latent is not None:
            index = self.index_of(layer)
            return self.latent.width + (0 if index is None else index.width)
        return 2 * self.kv_heads(layer) * self.head_dim

    def kv_scale(self, layer: int) -> tuple[float, float]:
        """The divisor of a layer's keys and values in a cache of 8-bit floats."""
        return (1.0, 1.0) if self.kv_scales is None else self.kv_scales[layer]

    def rope_of(self, layer: int) -> RopeConfig | None:
        """The layer's rotary embedding; None if it has none."""
        if layer in self.unrotated:
            return None
        return self.rope if self.windows[layer] is None else self.local_rope or self.rope

    def has_unit_qk_norm(self, layer: int) -> bool:
        """Whether the layer normalises queries and keys without weights."""
        return self.unit_qk_norm and layer not in self.unrotated

    @property
    def merged_qkv(self) -> bool:
        """Whether a checkpoint has Q, K and V in one matrix."""
        return self.layout == "phi3"

    @property
    def merged_gate_up(self) -> bool:
        return self.layout in ("phi3", "glm", "glm4")

    @classmethod
    def from_hf(cls, checkpoint: Checkpoint) -> "ModelConfig":
        """Reads config.json. Raises ConfigError for the first field that is missing, broken or not
        supported."""
        fields = Fields(checkpoint.folder / "config.json", checkpoint.config)
        decoders = MULTIMODAL.get(checkpoint.architecture)
        if decoders is not None:
            return replace(_read(*_text_part(fields, decoders)), multimodal=True)
        family = ARCHITECTURES.get(checkpoint.architecture)
        if family is None:
            raise fields.error("architectures", f"one of {', '.join(ARCHITECTURES)}")
        return _read(fields, family)


def _text_part(fields: Fields, decoders: Mapping[str, Architecture]) -> tuple[Fields, Architecture]:
    """A multimodal model's decoder. Old checkpoints have its fields beside those of the other
    parts."""
    first = next(iter(decoders))
    if "vlm_config" in fields:
        fields = fields.part("vlm_config")
    if "text_config" not in fields:
        return fields, decoders[first]
    fields = fields.part("text_config")
    family = decoders.get(str(fields.get("model_type", first)))
    if family is None:
        raise fields.error("model_type", f"one of {', '.join(decoders)}")
    return fields, family


def _read(fields: Fields, family: Architecture) -> ModelConfig:
    if family.mixture is not None and family.mixture.shortcut:
        fields = fields.with_field("num_hidden_layers", 2 * fields.integer("num_layers"))
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads", family.num_heads)
    latent = None if family.latents is None else _latent(fields, family.latents)
    if latent is None:
        head_dim = fields.integer("head_dim", default=family.head_dim or hidden // heads)
        kv_heads = fields.integer("num_key_value_heads", default=family.num_kv_heads or heads)
    else:
        head_dim, kv_heads = latent.width, 1
    rotary = head_dim if latent is None else latent.rotary
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    if head_dim % 2:
        raise fields.error("head_dim", "even")
    positions = fields.integer("max_position_embeddings", default=family.max_position_embeddings)
    chunked = family.windows == "chunked"
    read_windows = {"chunked": _chunks, "patterned": _patterned}.get(family.windows, _windows)
    windows = read_windows(fields, family)
    for name, allowed in family.required.items():
        fields.require(name, allowed, default=allowed[0])
    experts = _experts(fields, family)
    rope = read_rope(fields, family, rotary, positions)
    qk_norm = family.qk_norm
    if family.qk_norm_field is not None:
        qk_norm = fields.flag(family.qk_norm_field, family.qk_norm)
    if family.unit_qk_norm and qk_norm and rope.rope_type in ("yarn", "longrope"):
        # Norms without weights commute with a rotation, but not with the factor of these.
        raise fields.error("rope_scaling", "of another type than yarn and longrope")
    residual = fields.number("residual_multiplier", 1.0) if family.multipliers else 1.0
    value_dim = _value_dim(fields, family, head_dim)
    return ModelConfig(
        vocab_size=fields.integer("vocab_size", family.vocab_size),
        hidden_size=hidden,
        intermediate_size=_intermediate_size(fields, family, experts),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        # Scales the residual stream by the inverse, instead of scaling each sum. If their epsilon
        # is scaled too, norms give the same results, and no step needs extra work.
        rms_norm_eps=fields.number("rms_norm_eps", family.rms_norm_eps) / residual**2,
        max_position_embeddings=positions,
        rope=rope,
        local_rope=read_local_rope(fields, family, head_dim, positions),
        tie_word_embeddings=fields.flag("tie_word_embeddings", family.tie_word_embeddings),
        qkv_bias=_bias(fields, family.qkv_bias, family.qkv_bias_field),
        o_bias=_bias(fields, family.o_bias, family.o_bias_field),
        mlp_bias=fields.flag(family.mlp_bias_field),
        qk_norm=qk_norm and not family.unit_qk_norm,
        unit_qk_norm=qk_norm and family.unit_qk_norm,
        wide_qk_norm=family.wide_qk_norm,
        rotated_qk_norm=family.rotated_qk_norm,
        windows=windows,
        chunked=chunked,
        unrotated=_unrotated(fields, family, windows),
        interleaved=family.interleaved,
        query_scaling=read_query_scaling(fields, family),
        scale=_scale(fields, family, head_dim) if latent is None else _latent_scale(latent, rope),
        layout=family.layout,
        activation=_activation(fields, family),
        embedding_scale=_embedding_scale(fields, family, residual),
        rounds_embedding_scale=family.gemma,
        offset_norms=family.gemma,
        input_norms=family.norms != "after",
        output_norms=family.norms != "before",
        attention_softcap=_attention_softcap(fields, family),
        logits_softcap=(
            fields.optional("final_logit_softcapping", family.logits_softcap)
            if _has_gemma_fields(family)
            else None
        ),
        logits_divisor=fields.number("logits_scaling", 1.0) if family.multipliers else None,
        experts=experts,
        latent=latent,
        sinks=family.sinks,
        window_kv_heads=_window_kv_heads(fields, family, heads, kv_heads),
        value_dim=value_dim,
        value_scale=None
        if family.value_scale is None
        else fields.optional("attention_value_scale", family.value_scale),
        draft_layers=fields.count("num_nextn_predict_layers", family.draft_layers),
    )


def _value_dim(fields: Fields, family: Architecture, head_dim: int) -> int | None:
    """The width of values where they are narrower than keys. Layers with a window must have the
    same heads as the others."""
    if family.value_dim is None:
        return None
    found = fields.integer("v_head_dim", family.value_dim)
    if found > head_dim:
        raise fields.error("v_head_dim", f"at most head_dim ({head_dim})")
    for name, value in (("swa_head_dim", head_dim), ("swa_v_head_dim", found)):
        fields.require(name, (value,), default=value)
    return found


def _window_kv_heads(fields: Fields, family: Architecture, heads: int, kv_heads: int) -> int | None:
    """The number of KV heads of layers with a window, where it differs from that of the others."""
    if family.window_kv_heads is None:
        return None
    fields.require("swa_num_attention_heads", (heads,), default=heads)
    name = "swa_num_key_value_heads"
    found = fields.integer(name, family.window_kv_heads * kv_heads)
    if heads % found:
        raise fields.error(name, f"a divisor of num_attention_heads ({heads})")
    return found


def _bias(fields: Fields, fixed: bool | None, name: str | None) -> bool:
    if fixed is None:
        return fields.flag("attention_bias")
    return fixed if name is None else fields.flag(name, fixed)


def _has_gemma_fields(family: Architecture) -> bool:
    """Whether the family has the fields that came with Gemma 2."""
    return family.gemma and family.norms == "around"


def _intermediate_size(fields: Fields, family: Architecture, experts: ExpertsConfig | None) -> int:
    """The inner size of MLPs; that of experts if there are no MLPs."""
    if family.mixture is not None and experts is not None and all(experts.sparse):
        return experts.intermediate_size
    return fields.integer(family.inner_field, family.inner)


def _scale(fields: Fields, family: Architecture, head_dim: int) -> float:
    if family.multipliers:
        return fields.number("attention_multiplier", 1.0)
    if not _has_gemma_fields(family):
        return float(head_dim**-0.5)
    return float(fields.number("query_pre_attn_scalar", 256.0) ** -0.5)


def _latent(fields: Fields, family: Latents) -> LatentConfig:
    found = LatentConfig(
        rank=fields.integer("kv_lora_rank", 512),
        rotary=fields.integer("qk_rope_head_dim", 64),
        plain=fields.integer("qk_nope_head_dim", family.plain),
        value=fields.integer("v_head_dim", family.value),
        query_rank=fields.optional_integer("q_lora_rank", family.query_rank),
        index=None if family.index_heads is None else _index(fields, family, family.index_heads),
    )
    if not family.scaled:
        return found
    if found.query_rank is None:
        raise fields.error("q_lora_rank", "a whole number above 0")
    fields.require("qk_head_dim", (found.query_width,), default=found.query_width)
    hidden = fields.integer("hidden_size")
    return replace(
        found,
        query_factor=(hidden / found.query_rank) ** 0.5,
        factor=(hidden / found.rank) ** 0.5,
    )


def _index(fields: Fields, family: Latents, heads: int) -> IndexConfig:
    shared = _shared_index(fields)
    if shared and not family.index_shared:
        raise fields.error(
            "indexer_types", "full for all layers: layers of this model share no chosen keys"
        )
    if fields.optional_integer("q_lora_rank", family.query_rank) is None:
        raise fields.error("q_lora_rank", "a whole number above 0")
    found = IndexConfig(
        heads=fields.integer("index_n_heads", heads),
        width=fields.integer("index_head_dim", 128),
        kept=fields.integer("index_topk", 2048),
        interleaved=family.index_interleaved,
        shared=shared,
    )
    rotary = fields.integer("qk_rope_head_dim", 64)
    if found.width < rotary:
        raise fields.error("index_head_dim", f"at least qk_rope_head_dim ({rotary})")
    return found


def _shared_index(fields: Fields) -> frozenset[int]:
    """The layers that use the keys that the layer before them uses: those that indexer_types or
    index_topk_pattern calls shared, or all but every index_topk_freq-th after the first ones."""
    layers = range(fields.integer("num_hidden_layers"))
    every, first = fields.integer("index_topk_freq", 1), fields.count("index_skip_topk_offset", 2)
    usual: Any = ["shared" if max(layer - first + 1, 0) % every else "full" for layer in layers]
    if fields.get("index_topk_pattern", None) is not None:
        usual = [
            {"F": "full", "S": "shared"}.get(kind, kind)
            for kind in fields.get("index_topk_pattern", "")
        ]
    kinds = fields.get("indexer_types", usual)
    if not isinstance(kinds, list) or len(kinds) != len(layers):
        raise fields.error("indexer_types", f"a list of {len(layers)} names")
    if not set(kinds) <= {"full", "shared"} or kinds[0] != "full":
        raise fields.error("indexer_types", "made of full and shared, and begin with full")
    return frozenset(layer for layer in layers if kinds[layer] == "shared")


def _latent_scale(latent: LatentConfig, rope: RopeConfig) -> float:
    """The scale of attention over latents.

    It includes the factor of queries, and YaRN's second factor, which is not part of cos and sin.
    """
    weight = rope.parameters.get("mscale_all_dim")
    scale = float(latent.query_width**-0.5) * latent.query_factor
    if rope.rope_type == "default" or not weight:
        return scale
    return scale * yarn_mscale(rope.parameters["factor"], weight) ** 2


def _embedding_scale(fields: Fields, family: Architecture, residual: float) -> float | None:
    if family.multipliers:
        return fields.number("embedding_multiplier", 1.0) / residual
    return fields.integer("hidden_size") ** 0.5 if family.gemma else None


def _unrotated(
    fields: Fields, family: Architecture, windows: tuple[int | None, ...]
) -> frozenset[int]:
    if family.unrotated == "none":
        return frozenset()
    layers = range(len(windows))
    if family.unrotated == "global":
        slides = any(windows)
        return frozenset(index for index in layers if slides and windows[index] is None)
    rotated = _rotated(fields, family, len(windows))
    return frozenset(index for index in layers if not rotated[index])


def _rotated(fields: Fields, family: Architecture, layers: int) -> list[Any]:
    """no_rope_layers: for each layer a number above 0, or 0 if it is not rotated."""
    every = fields.integer("no_rope_layer_interval", 4)
    usual = [(index + 1) % every for index in range(layers)]
    rotated = fields.get("no_rope_layers", usual)
    if family.windows == "chunked" and rotated == []:
        return usual
    if not isinstance(rotated, list) or len(rotated) < layers:
        raise fields.error("no_rope_layers", f"a list of {layers} numbers")
    return rotated


def _activation(fields: Fields, family: Architecture) -> Activation:
    if not family.gemma:
        fields.require("hidden_act", ("silu", "swish"), default="silu")
        return "silu"
    name = "hidden_activation" if fields.get("hidden_activation", None) else "hidden_act"
    fields.require(name, ("gelu_pytorch_tanh",), default="gelu_pytorch_tanh")
    fields.require("use_bidirectional_attention", (False,), default=False)
    return "gelu_tanh"


def _attention_softcap(fields: Fields, family: Architecture) -> float | None:
    cap = fields.optional("attn_logit_softcapping", family.attention_softcap)
    if cap is not None and family.attention_softcap is None:
        raise fields.error("attn_logit_softcapping", "null for this architecture")
    return cap


def _windows(fields: Fields, family: Architecture) -> tuple[int | None, ...]:
    layers = fields.integer("num_hidden_layers")
    if family.windows == "none":
        return (None,) * layers
    if family.windows == "all":
        return (fields.optional_integer("sliding_window", family.sliding_window),) * layers
    if family.windows == "typed":
        window = fields.optional_integer("sliding_window", family.sliding_window)
        if window is not None:
            _require_layer_types(fields, layers)
        return _named(fields, window, [False] * layers)
    if family.windows == "late":
        first = fields.count("max_window_layers", layers)
        sliding = [index >= first for index in range(layers)]
        return _named(
            fields, fields.optional_integer("sliding_window", family.sliding_window), sliding
        )
    if family.windows == "interleaved":
        window = fields.optional_integer("sliding_window", family.sliding_window)
        if window is None and family.local_rope_theta is not None:
            raise fields.error("sliding_window", "a whole number above 0")
        return _named(fields, window, _interleaved(fields, family, layers))
    used = fields.flag("use_sliding_window")
    window = fields.optional_integer("sliding_window", 4096) if used else None
    if family.windows == "switched":
        return (window,) * layers
    if window is not None and family.windows == "named":
        _require_layer_types(fields, layers)
    first = fields.get("max_window_layers", 28) if window is not None else layers
    return _named(fields, window, [index >= first for index in range(layers)])


def _chunks(fields: Fields, family: Architecture) -> tuple[int | None, ...]:
    layers, size = fields.integer("num_hidden_layers"), fields.integer("attention_chunk_size", 8192)
    rotated = [bool(each) for each in _rotated(fields, family, layers)[:layers]]
    return _named(fields, size, rotated, "chunked_attention")


def _require_layer_types(fields: Fields, layers: int) -> None:
    if fields.get("layer_types", None) is None:
        raise fields.error("layer_types", f"a list of {layers} names where layers have a window")


def _interleaved(fields: Fields, family: Architecture, layers: int) -> list[bool]:
    every = fields.integer("sliding_window_pattern", default=family.global_every)
    return [bool((index + 1) % every) for index in range(layers)]


def _patterned(fields: Fields, family: Architecture) -> tuple[int | None, ...]:
    """With hybrid_layer_pattern: for each layer 1 if it has a window, otherwise 0."""
    layers = fields.integer("num_hidden_layers")
    window = fields.integer("sliding_window", family.sliding_window)
    if fields.get("sliding_window_size", None) is not None:  # without the position itself
        window = fields.integer("sliding_window_size") + 1
    usual = [index > 0 and (index + 1) % 6 > 0 for index in range(layers)]
    pattern = fields.get("hybrid_layer_pattern", usual)
    if not isinstance(pattern, list) or len(pattern) != layers or not set(pattern) <= {0, 1}:
        raise fields.error("hybrid_layer_pattern", f"a list of {layers} numbers 0 or 1")
    return _named(fields, window, [bool(each) for each in pattern])


def _named(
    fields: Fields, window: int | None, sliding: list[bool], kind: str = "sliding_attention"
) -> tuple[int | None, ...]:
    """The windows of the layers that layer_types calls `kind`, or of those in `sliding`."""
    names = ("full_attention", kind)
    kinds = fields.get("layer_types", [names[slides] for slides in sliding])
    if not isinstance(kinds, list) or len(kinds) != len(sliding):
        raise fields.error("layer_types", f"a list of {len(sliding)} names")
    if not set(kinds) <= set(names):
        raise fields.error("layer_types", f"made of {' and '.join(names)}")
    return tuple(window if each == kind else None for each in kinds)


def _experts(fields: Fields, family: Architecture) -> ExpertsConfig | None:
    if family.mixture is not None:
        return _checked(fields, _mixture(fields, family.mixture))
    if family.experts == "none":
        return None
    if family.experts == "mixtral":
        return _checked(fields, _every_layer(fields, 8, 2))
    if family.experts == "gptoss":
        # A softmax over the chosen experts equals the softmax over all, divided by the sum of the
        # chosen.
        swiglu = ClampedSwiGLU(
            fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)
        )
        found = _every_layer(fields, 128, 4)
        return _checked(fields, replace(found, bias=True, swiglu=swiglu))
    name = "num_experts" if "num_experts" in fields else "num_local_experts"
    shared = (
        fields.integer("shared_expert_intermediate_size", 5632) if family.shared_expert else None
    )
    return _checked(
        fields,
        ExpertsConfig(
            count=fields.integer(name, 60 if family.shared_expert else 128),
            per_token=fields.integer("num_experts_per_tok", 4 if family.shared_expert else 8),
            intermediate_size=fields.integer(
                "moe_intermediate_size", 1408 if family.shared_expert else 768
            ),
            renormalise=fields.flag("norm_topk_prob"),
            shared_size=shared,
            sparse=sparse_layers(fields),
        ),
    )


def _mixture(fields: Fields, family: Mixture) -> ExpertsConfig:
    inner = fields.integer(family.inner_field, family.inner)
    shared = family.shared
    if family.shared_field is not None:
        shared = fields.count(family.shared_field, family.shared)
    renormalise = family.renormalise
    method = fields.get("topk_method", None)
    grouped = family.grouped == "always" or (
        family.grouped == "named" and method == "group_limited_greedy"
    )
    found = ExpertsConfig(
        count=fields.same_integer(family.count_field, family.count),
        per_token=fields.same_integer(family.chosen_field, family.per_token),
        intermediate_size=inner,
        renormalise=fields.flag("norm_topk_prob", family.renormalised)
        if renormalise is None
        else renormalise,
        shared_size=shared * inner or None,
        sparse=_mixture_layers(fields, family),
        sigmoid=family.scoring == "sigmoid",
        correction=family.correction,
        groups=fields.integer("n_group", family.groups[0]) if grouped else 1,
        kept_groups=fields.integer("topk_group", family.groups[1]) if grouped else 1,
        group_best=family.group_best,
        factor=1.0
        if family.factor is None
        else fields.number("routed_scaling_factor", family.factor),
        shared_gate=False,
        scaled_inputs=family.scaled_inputs,
        zero=0 if family.zero is None else fields.count("zero_expert_num", family.zero),
        shortcut=family.shortcut,
    )
    groups, kept = found.groups, found.kept_groups
    if (
        groups > MAX_EXPERT_GROUPS
        or found.count % groups
        or found.count // groups < family.group_best
    ):
        raise fields.error(
            "n_group",
            f"a divisor of the number of experts {found.count}, at most {MAX_EXPERT_GROUPS}, with "
            f"groups of at least {family.group_best}",
        )
    if kept > groups or kept * (found.count // groups) < found.per_token:
        raise fields.error(
            "topk_group",
            f"at most n_group ({groups}), with at least {found.per_token} experts in these groups",
        )
    # With one group there is no choice.
    return replace(found, groups=1, kept_groups=1) if kept == groups else found


def _mixture_layers(fields: Fields, family: Mixture) -> tuple[bool, ...]:
    """Whether each layer has a mixture."""
    layers = range(fields.integer("num_hidden_layers"))
    if family.dense == "none":
        return (not family.shortcut,) * len(layers)
    if family.dense == "first":
        first = fields.count("first_k_dense_replace", family.dense_layers)
        return tuple(index >= first for index in layers)
    if family.dense == "typed":
        first = fields.count("first_k_dense_replace", family.dense_layers)
        usual = ["dense" if index < first else "sparse" for index in layers]
        stated = fields.get("moe_layer_freq", None)
        if isinstance(stated, list):
            usual = ["sparse" if each else "dense" for each in stated]
        kinds = fields.get("mlp_layer_types", usual)
        if not isinstance(kinds, list) or len(kinds) != len(layers):
            raise fields.error("mlp_layer_types", f"a list of {len(layers)} names")
        if not set(kinds) <= {"dense", "sparse"}:
            raise fields.error("mlp_layer_types", "made of dense and sparse")
        return tuple(kind == "sparse" for kind in kinds)
    if family.dense == "listed":
        every = fields.integer("interleave_moe_layer_step", 1)
        sparse = fields.get("moe_layers", list(range(every - 1, len(layers), every)))
        if not isinstance(sparse, list):
            raise fields.error("moe_layers", "a list of layers")
        return tuple(index in sparse for index in layers)
    step = fields.integer("moe_layer_interval", 1)
    start = fields.count("moe_layer_start_index", 1)
    end = fields.get("moe_layer_end_index", -1)
    if isinstance(end, bool) or not isinstance(end, int) or end < -1:
        raise fields.error("moe_layer_end_index", "a layer, or -1 for the last")
    last = len(layers) - 1 if end == -1 else end
    return tuple(start <= index <= last and (index + 1) % step == 0 for index in layers)


def _every_layer(fields: Fields, count: int, per_token: int) -> ExpertsConfig:
    """A mixture in every layer, with the family's default numbers of experts."""
    return ExpertsConfig(
        count=fields.integer("num_local_experts", count),
        per_token=fields.integer("num_experts_per_tok", per_token),
        intermediate_size=fields.integer("intermediate_size"),
        renormalise=True,
        shared_size=None,
        sparse=(True,) * fields.integer("num_hidden_layers"),
    )


def _checked(fields: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    if experts.per_token > experts.choices:
        raise fields.error(
            "num_experts_per_tok", f"at most the number of experts {experts.choices}"
        )
    return experts


def sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """For each layer: whether it has a mixture, by decoder_sparse_step and mlp_only_layers."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise fields.error("mlp_only_layers", "a list of layers")
    layers = range(fields.integer("num_hidden_layers"))
    return tuple(index not in dense and (index + 1) % step == 0 for index in layers)
