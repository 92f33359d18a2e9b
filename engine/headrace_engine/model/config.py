"""What a native decoder needs to know of a checkpoint, read from its config.json.

Defaults for absent fields are those of transformers' config classes. A value that the native
decoder cannot honour raises ConfigError naming file and field, never passes silently.
"""

from dataclasses import dataclass
from typing import Literal

from .architectures import ARCHITECTURES, Architecture, TensorLayout
from .checkpoint import Checkpoint
from .fields import Fields
from .rope import RopeConfig, read_local_rope, read_rope

__all__ = ["ARCHITECTURES", "ExpertsConfig", "ModelConfig", "RopeConfig"]

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP, in the layers whose entry of `sparse` is true.

    `per_token` experts of `count` compute each token; their weights are the softmax over all,
    divided by their sum where `renormalise`. `shared_size` is the inner size of an expert that
    computes every token, or None.
    """

    count: int
    per_token: int
    intermediate_size: int
    renormalise: bool
    shared_size: int | None
    sparse: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's shape.

    `windows` has one entry a layer: keys it sees, self included, or None; `local_rope` rotates the
    layers with one. `scale` multiplies attention scores, `embedding_scale` embeddings. With
    `offset_norms` norms multiply by 1 + weight; with `output_norms` there is one behind attention
    and one behind the MLP. `kv_scales`, of its weights, has an entry a layer.
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
    local_rope: RopeConfig | None = None
    layout: TensorLayout = "llama"
    text_part: str = ""
    activation: Activation = "silu"
    embedding_scale: float | None = None
    offset_norms: bool = False
    output_norms: bool = False
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    experts: ExpertsConfig | None = None
    kv_scales: tuple[tuple[float, float], ...] | None = None

    def kv_scale(self, layer: int) -> tuple[float, float]:
        """What a layer's keys and values are divided by in a cache of 8-bit floats."""
        return (1.0, 1.0) if self.kv_scales is None else self.kv_scales[layer]

    @classmethod
    def from_hf(cls, checkpoint: Checkpoint) -> "ModelConfig":
        """Raises ConfigError naming the first field that is missing, broken or not supported."""
        fields = Fields(checkpoint.folder / "config.json", checkpoint.config)
        family = ARCHITECTURES.get(checkpoint.architecture)
        if family is None:
            raise fields.error("architectures", f"one of {', '.join(ARCHITECTURES)}")
        if family.text_part:
            fields = Fields(fields.path, fields.object("text_config"), prefix="text_config.")
        return _read(fields, family)


def _read(fields: Fields, family: Architecture) -> ModelConfig:
    hidden = fields.whole("hidden_size")
    heads = fields.whole("num_attention_heads", family.num_heads)
    head_dim = fields.whole("head_dim", default=family.head_dim or hidden // heads)
    kv_heads = fields.whole("num_key_value_heads", default=family.num_kv_heads or heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    if head_dim % 2:
        raise fields.error("head_dim", "even")
    positions = fields.whole("max_position_embeddings", default=family.max_position_embeddings)
    bias = fields.flag("attention_bias")
    return ModelConfig(
        vocab_size=fields.whole("vocab_size", family.vocab_size),
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=fields.whole("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", family.rms_norm_eps),
        max_position_embeddings=positions,
        rope=read_rope(fields, family, head_dim, positions),
        local_rope=read_local_rope(fields, family, head_dim, positions),
        tie_word_embeddings=fields.flag("tie_word_embeddings", family.tie_word_embeddings),
        qkv_bias=_qkv_bias(fields, family, bias),
        o_bias=bias if family.o_bias is None else family.o_bias,
        mlp_bias=fields.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        windows=_windows(fields, family),
        scale=_scale(fields, family, head_dim),
        layout=family.layout,
        text_part=family.text_part,
        activation=_activation(fields, family),
        embedding_scale=hidden**0.5 if family.gemma else None,
        offset_norms=family.gemma,
        output_norms=family.output_norms,
        attention_softcap=_attention_softcap(fields, family),
        logits_softcap=(
            fields.optional("final_logit_softcapping", family.logits_softcap)
            if family.output_norms
            else None
        ),
        experts=_experts(fields, family),
    )


def _qkv_bias(fields: Fields, family: Architecture, bias: bool) -> bool:
    if family.qkv_bias is None:
        return bias
    if family.qkv_bias_field is None:
        return family.qkv_bias
    return fields.flag(family.qkv_bias_field, family.qkv_bias)


def _scale(fields: Fields, family: Architecture, head_dim: int) -> float:
    if not family.output_norms:
        return float(head_dim**-0.5)
    return float(fields.number("query_pre_attn_scalar", 256.0) ** -0.5)


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
    layers = fields.whole("num_hidden_layers")
    if family.windows == "none":
        return (None,) * layers
    if family.windows == "all":
        return (fields.window("sliding_window", family.sliding_window),) * layers
    if family.windows == "interleaved":
        window = fields.window("sliding_window", family.sliding_window)
        if window is None and family.local_rope_theta is not None:
            raise fields.error("sliding_window", "a whole number above 0")
        return _named(fields, window, _interleaved(fields, family, layers))
    used = fields.flag("use_sliding_window")
    window = fields.window("sliding_window", 4096) if used else None
    if family.windows == "switched":
        return (window,) * layers
    if window is not None and family.windows == "named" and "layer_types" not in fields:
        raise fields.error("layer_types", f"a list of {layers} names where layers have a window")
    first = fields.get("max_window_layers", 28) if window is not None else layers
    return _named(fields, window, [index >= first for index in range(layers)])


def _interleaved(fields: Fields, family: Architecture, layers: int) -> list[bool]:
    every = fields.whole("sliding_window_pattern", default=family.global_every)
    return [bool((index + 1) % every) for index in range(layers)]


def _named(fields: Fields, window: int | None, sliding: list[bool]) -> tuple[int | None, ...]:
    """Windows of the layers that layer_types names, or else of those in `sliding`."""
    names = ("full_attention", "sliding_attention")
    kinds = fields.get("layer_types", [names[slides] for slides in sliding])
    if not isinstance(kinds, list) or len(kinds) != len(sliding):
        raise fields.error("layer_types", f"a list of {len(sliding)} names")
    if not set(kinds) <= set(names):
        raise fields.error("layer_types", f"made of {' and '.join(names)}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _experts(fields: Fields, family: Architecture) -> ExpertsConfig | None:
    if family.experts == "none":
        return None
    if family.experts == "mixtral":
        return _checked(
            fields,
            ExpertsConfig(
                count=fields.whole("num_local_experts", 8),
                per_token=fields.whole("num_experts_per_tok", 2),
                intermediate_size=fields.whole("intermediate_size"),
                renormalise=True,
                shared_size=None,
                sparse=(True,) * fields.whole("num_hidden_layers"),
            ),
        )
    name = "num_experts" if "num_experts" in fields else "num_local_experts"
    shared = fields.whole("shared_expert_intermediate_size", 5632) if family.shared_expert else None
    return _checked(
        fields,
        ExpertsConfig(
            count=fields.whole(name, 60 if family.shared_expert else 128),
            per_token=fields.whole("num_experts_per_tok", 4 if family.shared_expert else 8),
            intermediate_size=fields.whole(
                "moe_intermediate_size", 1408 if family.shared_expert else 768
            ),
            renormalise=fields.flag("norm_topk_prob"),
            shared_size=shared,
            sparse=_sparse(fields),
        ),
    )


def _checked(fields: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    if experts.per_token > experts.count:
        raise fields.error("num_experts_per_tok", f"at most the number of experts {experts.count}")
    return experts


def _sparse(fields: Fields) -> tuple[bool, ...]:
    step = fields.whole("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise fields.error("mlp_only_layers", "a list of layers")
    layers = range(fields.whole("num_hidden_layers"))
    return tuple(index not in dense and (index + 1) % step == 0 for index in layers)
