"""The families of decoders that the native implementation supports, described by their differences.

Defaults for absent fields of config.json are those of transformers' config classes. A family
without differences is like Llama.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

# Which layers have a sliding window: none; all; all if use_sliding_window is set (switched). With
# that switch: the layers of layer_types or max_window_layers (layers), or of layer_types alone
# (named). Without it: the layers of layer_types (typed), or else all but every n-th (interleaved),
# or else those from max_window_layers on (late). With chunks of attention_chunk_size instead: the
# layers of layer_types, or else those that are rotated (chunked). The layers of layer_types, or
# those with a 1 in hybrid_layer_pattern, or else all but the first and every sixth (patterned).
Windows = Literal[
    "none",
    "all",
    "switched",
    "layers",
    "named",
    "typed",
    "interleaved",
    "late",
    "chunked",
    "patterned",
]
# Where a layer has norms: before attention and MLP, before and after them, or only after them.
Norms = Literal["before", "around", "after"]
# Which layers are not rotated: none; those with a 0 in no_rope_layers, or every n-th (listed);
# those without a window if other layers have one (global).
Unrotated = Literal["none", "listed", "global"]
# Which layers have a sink in the softmax of each head: none, all, or those with a window.
Sinks = Literal["none", "all", "windows"]
# How a checkpoint names and splits its matrices.
TensorLayout = Literal[
    "llama",
    "phi3",
    "mixtral",
    "glm",
    "glm4",
    "gptoss",
    "deepseek",
    "ernie",
    "hunyuan",
    "llama4",
    "mimo",
    "longcat",
]
# Which layers have an MLP instead of a mixture: none; as many as first_k_dense_replace, from layer
# 0 on (first); those that mlp_layer_types calls dense, or those with a 0 in moe_layer_freq, or else
# the same (typed). By their numbers:
# those outside moe_layer_start_index to moe_layer_end_index, in steps of moe_layer_interval
# (ranged); those outside moe_layers, or all but every n-th (listed).
Dense = Literal["none", "first", "typed", "ranged", "listed"]


# How the three positions of a token (frame, row and column in an image) share the frequencies of
# the rotation: none, where there is one position; one range after the other (split); or in turns
# (interleaved).
MRope = Literal["none", "split", "interleaved"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """How one family's mixtures of experts differ from a softmax over all experts.

    `count`, `per_token` and `inner` replace absent fields, which `count_field` and so on name.
    `scoring` makes scores of the router's logits. With `correction` experts are chosen by their
    scores plus a stored bias, and weighted by the scores. With `grouped` (always, or where
    topk_method is group_limited_greedy) only the best groups of experts are chosen from: topk_group
    of n_group, with the defaults `groups`; a group's score is the sum of its `group_best` best
    scores. `renormalise` None follows norm_topk_prob, `renormalised` if it is absent. `factor` is
    the default of routed_scaling_factor, which multiplies weights; None: nothing does.
    `shared_field` names the number of experts that compute every token, `shared` if it is absent or
    there is no such field. `dense_layers` is the default of first_k_dense_replace. With
    `scaled_inputs` weights multiply what experts read instead of what they return. `zero` is the
    default of zero_expert_num: experts that return what they read; None: there are none. With
    `shortcut` the mixture lies beside two layers (LongCat-Flash), of which num_layers counts pairs.
    """

    count: int | None = None
    per_token: int | None = None
    inner: int | None = None
    count_field: str = "n_routed_experts"
    chosen_field: str = "num_experts_per_tok"
    inner_field: str = "moe_intermediate_size"
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    grouped: Literal["never", "always", "named"] = "never"
    groups: tuple[int, int] = (1, 1)
    group_best: int = 1
    renormalise: bool | None = None
    renormalised: bool = False
    factor: float | None = None
    shared_field: str | None = None
    shared: int = 0
    dense: Dense = "none"
    dense_layers: int = 0
    scaled_inputs: bool = False
    zero: int | None = None
    shortcut: bool = False


@dataclass(frozen=True, slots=True)
class Latents:
    """Attention over latents (MLA): defaults of q_lora_rank, qk_nope_head_dim and v_head_dim.

    `scaled`: queries and latents are multiplied by the root of hidden_size over their rank.

    With `index_heads`, the default of index_n_heads, an indexer chooses the keys of each position
    (DeepSeek V3.2). Its rotation pairs neighbours if `index_interleaved`. With `index_shared` some
    layers may attend to the keys that the layer before them attends to.
    """

    query_rank: int = 1536
    plain: int = 128
    value: int = 128
    index_heads: int | None = None
    index_interleaved: bool = False
    index_shared: bool = False
    scaled: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one family differs from the common decoder.

    `qkv_bias`, `o_bias` None follow config.json's attention_bias; `qkv_bias_field`, `o_bias_field`
    name fields of their own. `gemma` stands for what all Gemmas share: norms times (1 + weight),
    scaled embeddings, a tanh GELU, and query_pre_attn_scalar if there are norms before and after.
    `wide_qk_norm`: Q and K norms cover all heads together; `rotated_qk_norm`: they come after the
    rotation; `unit_qk_norm`: they have no weights, and rotated layers alone have them.
    `partial_rotary` is the share of a head that is rotated if config.json has none; None:
    always all of it. `interleaved` rotation pairs neighbours. `scaled_queries`: scaled by position,
    by llama_4_scaling_beta in all layers (all), or by attn_scale in those without rotation
    (unrotated). `multipliers`: Granite's four fields. `global_every` n: every n-th
    layer sees all keys if config.json does not say. `vocab_size`, `num_heads` and `num_kv_heads`
    replace absent fields. `value_dim` is the default of v_head_dim, where values are narrower than
    keys and are scaled by attention_value_scale (`value_scale`). Layers with a window have
    swa_num_key_value_heads KV heads; `window_kv_heads` is their default, times num_key_value_heads;
    None: all layers have the same number. `mrope_section` is the default number of frequencies of
    each of a token's three positions, where `mrope` is not none. `qk_norm_field` names the switch
    of `qk_norm` or `unit_qk_norm`, whose default is `qk_norm`. `inner_field` names the inner size
    of MLPs, whose default is `inner`. `mixture` replaces `experts`. `latents`: attention is over
    latents. `draft_layers` is the default of num_nextn_predict_layers. `required` has fields that
    must be absent or have one of these values.
    """

    qkv_bias: bool | None = None
    qkv_bias_field: str | None = None
    o_bias: bool | None = None
    o_bias_field: str | None = None
    mlp_bias_field: str = "mlp_bias"
    qk_norm: bool = False
    qk_norm_field: str | None = None
    wide_qk_norm: bool = False
    rotated_qk_norm: bool = False
    unit_qk_norm: bool = False
    windows: Windows = "none"
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    sliding_window: int | None = None
    layout: TensorLayout = "llama"
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, str | float | bool] = field(default_factory=dict)
    local_rope_theta: float | None = None
    local_rope_field: str = "rope_local_base_freq"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    partial_rotary: float | None = None
    interleaved: bool = False
    unrotated: Unrotated = "none"
    scaled_queries: Literal["none", "all", "unrotated"] = "none"
    inner_field: str = "intermediate_size"
    inner: int | None = None
    multipliers: bool = False
    gemma: bool = False
    norms: Norms = "before"
    global_every: int = 2
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    experts: Literal["none", "mixtral", "qwen", "gptoss"] = "none"
    sinks: Sinks = "none"
    shared_expert: bool = False
    mixture: Mixture | None = None
    latents: Latents | None = None
    draft_layers: int = 0
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    vocab_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    value_dim: int | None = None
    value_scale: float | None = None
    window_kv_heads: int | None = None
    mrope: MRope = "none"
    mrope_section: tuple[int, int, int] = (16, 24, 24)


# The decoders with recurrent layers; models.hybrid reads their config.json.
RECURRENT = (
    "BambaForCausalLM",
    "FalconH1ForCausalLM",
    "FalconMambaForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
# Those of them whose attention is over latents.
_LATENT_RECURRENT = ("KimiLinearForCausalLM",)
_MISTRAL = Architecture(qkv_bias=False, o_bias=False, windows="all", max_position_embeddings=131072)
_QWEN2 = Architecture(qkv_bias=True, o_bias=False, windows="layers")
_ERNIE = Architecture(
    qkv_bias=False,
    o_bias=False,
    max_position_embeddings=131072,
    interleaved=True,
    rope_theta=500_000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)
_OLMO2 = Architecture(
    qk_norm=True,
    wide_qk_norm=True,
    norms="after",
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
)
_GLM = Architecture(
    qkv_bias=True,
    qkv_bias_field="attention_bias",
    o_bias=False,
    head_dim=128,
    num_kv_heads=2,
    max_position_embeddings=131072,
    layout="glm",
    partial_rotary=0.5,
    interleaved=True,
    rms_norm_eps=0.00000015625,
)
# DeepSeek-V3's routing.
_SIGMOID = Mixture(
    scoring="sigmoid",
    correction=True,
    grouped="always",
    group_best=2,
    renormalised=True,
    factor=1.0,
    shared_field="n_shared_experts",
    shared=1,
)
_DEEPSEEK_V3 = replace(
    _SIGMOID,
    count=256,
    per_token=8,
    inner=2048,
    groups=(8, 4),
    factor=2.5,
    dense="first",
    dense_layers=3,
)
_GLM4_MOE = Architecture(
    o_bias=False,
    qk_norm_field="use_qk_norm",
    num_kv_heads=8,
    max_position_embeddings=131072,
    layout="deepseek",
    partial_rotary=0.5,
    rms_norm_eps=1e-5,
    mixture=replace(_SIGMOID, count=128, per_token=8, inner=1408, dense="first", dense_layers=1),
    draft_layers=1,
)
_HUNYUAN = Architecture(
    qk_norm=True,
    rotated_qk_norm=True,
    max_position_embeddings=2048,
    layout="hunyuan",
    rms_norm_eps=1e-5,
)
_LATENT = Architecture(
    qkv_bias=False,
    o_bias=False,
    layout="deepseek",
    interleaved=True,
    latents=Latents(),
    required={
        "attention_bias": (False,),
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
)

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(max_position_embeddings=2048),
    "Llama4ForCausalLM": Architecture(
        unit_qk_norm=True,
        qk_norm_field="use_qk_norm",
        qk_norm=True,
        windows="chunked",
        head_dim=128,
        max_position_embeddings=131072,
        layout="llama4",
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
        interleaved=True,
        unrotated="listed",
        scaled_queries="unrotated",
        inner_field="intermediate_size_mlp",
        inner=16384,
        mixture=Mixture(
            count=16,
            per_token=1,
            inner=8192,
            count_field="num_local_experts",
            inner_field="intermediate_size",
            scoring="sigmoid",
            renormalise=False,
            shared=1,
            dense="listed",
            scaled_inputs=True,
        ),
        vocab_size=202_048,
        num_heads=40,
        num_kv_heads=8,
    ),
    "MistralForCausalLM": replace(_MISTRAL, sliding_window=4096),
    "Qwen2ForCausalLM": _QWEN2,
    "MiMoForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": Architecture(qk_norm=True, windows="layers", head_dim=128),
    "Phi3ForCausalLM": Architecture(
        qkv_bias=False,
        o_bias=False,
        windows="all",
        max_position_embeddings=4096,
        layout="phi3",
        partial_rotary=1.0,
        rms_norm_eps=1e-5,
    ),
    "GemmaForCausalLM": Architecture(
        head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True, gemma=True
    ),
    "Gemma2ForCausalLM": Architecture(
        windows="interleaved",
        head_dim=256,
        max_position_embeddings=8192,
        sliding_window=4096,
        tie_word_embeddings=True,
        gemma=True,
        norms="around",
        attention_softcap=50.0,
        logits_softcap=30.0,
    ),
    "Gemma3ForCausalLM": Architecture(
        qk_norm=True,
        windows="interleaved",
        head_dim=256,
        max_position_embeddings=131072,
        sliding_window=4096,
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
        tie_word_embeddings=True,
        gemma=True,
        norms="around",
        global_every=6,
        vocab_size=262_208,
        num_heads=8,
        num_kv_heads=4,
    ),
    "SmolLM3ForCausalLM": Architecture(
        windows="named",
        unrotated="listed",
        num_kv_heads=4,
        rope_theta=2_000_000.0,
        tie_word_embeddings=True,
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(
        _OLMO2,
        windows="interleaved",
        global_every=4,
        sliding_window=4096,
        rope_theta=500_000.0,
        local_rope_theta=500_000.0,
    ),
    "GraniteForCausalLM": Architecture(multipliers=True, max_position_embeddings=2048),
    "Ministral3ForCausalLM": replace(
        _MISTRAL,
        head_dim=128,
        num_kv_heads=8,
        max_position_embeddings=262144,
        scaled_queries="all",
        rms_norm_eps=1e-5,
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, layout="glm4", norms="around"),
    "Exaone4ForCausalLM": Architecture(
        qkv_bias=False,
        o_bias=False,
        qk_norm=True,
        norms="after",
        windows="typed",
        sliding_window=4096,
        unrotated="global",
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
    ),
    "SeedOssForCausalLM": Architecture(
        qkv_bias=True,
        qkv_bias_field="attention_bias",
        o_bias=False,
        o_bias_field="attention_out_bias",
        head_dim=128,
        max_position_embeddings=524288,
    ),
    "Ernie4_5ForCausalLM": replace(
        _ERNIE,
        qkv_bias_field="use_bias",
        o_bias_field="use_bias",
        mlp_bias_field="use_bias",
        head_dim=128,
        num_kv_heads=2,
    ),
    "MixtralForCausalLM": replace(
        _MISTRAL,
        layout="mixtral",
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-5,
        experts="mixtral",
    ),
    "Qwen2MoeForCausalLM": Architecture(
        qkv_bias=True,
        qkv_bias_field="qkv_bias",
        o_bias=False,
        windows="named",
        experts="qwen",
        shared_expert=True,
    ),
    "GptOssForCausalLM": Architecture(
        qkv_bias=True,
        qkv_bias_field="attention_bias",
        o_bias=True,
        o_bias_field="attention_bias",
        windows="interleaved",
        head_dim=64,
        max_position_embeddings=131072,
        sliding_window=128,
        layout="gptoss",
        rope_theta=150_000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        rms_norm_eps=1e-5,
        experts="gptoss",
        sinks="all",
    ),
    "Qwen3MoeForCausalLM": Architecture(qk_norm=True, experts="qwen", windows="switched"),
    "Glm4MoeForCausalLM": _GLM4_MOE,
    "SolarOpenForCausalLM": replace(
        _GLM4_MOE,
        qk_norm_field=None,
        head_dim=128,
        partial_rotary=1.0,
        rope_theta=1_000_000.0,
        mixture=replace(_SIGMOID, count=128, per_token=8, inner=1280),
        draft_layers=0,
    ),
    "Dots1ForCausalLM": Architecture(
        qk_norm=True,
        windows="late",
        sliding_window=4096,
        max_position_embeddings=2048,
        layout="deepseek",
        num_kv_heads=32,
        mixture=replace(_SIGMOID, inner=1408, renormalised=False, shared=0, dense="first"),
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        qkv_bias=False,
        o_bias=False,
        qk_norm=True,
        wide_qk_norm=True,
        head_dim=128,
        num_kv_heads=8,
        max_position_embeddings=196608,
        layout="mixtral",
        rope_theta=5_000_000.0,
        partial_rotary=1.0,
        mixture=Mixture(
            count=256,
            per_token=8,
            count_field="num_local_experts",
            inner_field="intermediate_size",
            scoring="sigmoid",
            correction=True,
            renormalise=True,
        ),
        required={
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
            "shared_intermediate_size": (0,),
        },
    ),
    "MiMoV2FlashForCausalLM": Architecture(
        o_bias=False,
        windows="patterned",
        sliding_window=129,
        head_dim=192,
        value_dim=128,
        value_scale=0.707,
        num_heads=64,
        num_kv_heads=4,
        window_kv_heads=2,
        max_position_embeddings=131072,
        layout="mimo",
        rope_theta=5_000_000.0,
        local_rope_theta=10_000.0,
        local_rope_field="swa_rope_theta",
        partial_rotary=0.334,
        rms_norm_eps=1e-5,
        sinks="windows",
        mixture=replace(
            _SIGMOID,
            count=256,
            per_token=8,
            inner=2048,
            shared_field=None,
            shared=0,
            dense="typed",
            dense_layers=1,
        ),
        draft_layers=1,
        required={
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "add_swa_attention_sink_bias": (True,),
            "add_full_attention_sink_bias": (False,),
        },
    ),
    "OlmoeForCausalLM": Architecture(
        qk_norm=True,
        wide_qk_norm=True,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        mixture=Mixture(
            count=64, per_token=8, count_field="num_experts", inner_field="intermediate_size"
        ),
        required={"clip_qkv": (None,)},
    ),
    "Ernie4_5_MoeForCausalLM": replace(
        _ERNIE,
        num_kv_heads=4,
        layout="ernie",
        mixture=Mixture(
            count=64,
            per_token=6,
            inner=1536,
            count_field="moe_num_experts",
            chosen_field="moe_k",
            correction=True,
            renormalise=True,
            shared_field="moe_num_shared_experts",
            shared=2,
            dense="ranged",
        ),
        required={"use_bias": (False,)},
    ),
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "HunYuanMoEV1ForCausalLM": replace(
        _HUNYUAN,
        mixture=Mixture(
            count=1,
            per_token=1,
            count_field="num_experts",
            chosen_field="moe_topk",
            inner_field="intermediate_size",
            renormalise=True,
            shared=1,
        ),
    ),
    "DeepseekV2ForCausalLM": replace(
        _LATENT,
        max_position_embeddings=2048,
        mixture=Mixture(
            count=64,
            inner=1407,
            grouped="named",
            renormalise=False,
            factor=1.0,
            shared_field="n_shared_experts",
            shared=2,
            dense="first",
        ),
        required={
            "attention_bias": (False,),
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
            "norm_topk_prob": (False,),
            "moe_layer_freq": (1,),
        },
    ),
    "DeepseekV3ForCausalLM": replace(
        _LATENT,
        max_position_embeddings=4096,
        mixture=_DEEPSEEK_V3,
        draft_layers=1,
    ),
    "DeepseekV32ForCausalLM": replace(
        _LATENT,
        max_position_embeddings=163840,
        latents=Latents(index_heads=64),
        mixture=replace(_DEEPSEEK_V3, dense="typed"),
        draft_layers=1,
    ),
    "GlmMoeDsaForCausalLM": replace(
        _LATENT,
        max_position_embeddings=202752,
        rms_norm_eps=1e-5,
        latents=Latents(
            query_rank=2048,
            plain=192,
            value=256,
            index_heads=32,
            index_interleaved=True,
            index_shared=True,
        ),
        mixture=replace(_DEEPSEEK_V3, groups=(1, 1), dense="typed"),
        draft_layers=1,
    ),
    "LongcatFlashForCausalLM": replace(
        _LATENT,
        layout="longcat",
        max_position_embeddings=131072,
        rope_theta=10_000_000.0,
        rms_norm_eps=1e-5,
        inner_field="ffn_hidden_size",
        inner=12288,
        latents=Latents(scaled=True),
        mixture=Mixture(
            count=512,
            per_token=12,
            inner=2048,
            chosen_field="moe_topk",
            inner_field="expert_ffn_hidden_size",
            correction=True,
            renormalise=False,
            factor=6.0,
            zero=256,
            shortcut=True,
        ),
        draft_layers=1,
        required={
            "attention_bias": (False,),
            "attention_method": ("MLA",),
            "mla_scale_kv_lora": (True,),
            "mla_scale_q_lora": (True,),
            "norm_topk_prob": (False,),
            "router_bias": (False,),
            "zero_expert_type": ("identity",),
        },
    ),
    "Glm4MoeLiteForCausalLM": replace(
        _LATENT,
        max_position_embeddings=202752,
        rms_norm_eps=1e-5,
        latents=Latents(query_rank=768, plain=192, value=256),
        mixture=replace(
            _SIGMOID, count=64, per_token=4, inner=1536, factor=1.8, dense="typed", dense_layers=1
        ),
    ),
}


_QWEN2_VL = Architecture(
    qkv_bias=True,
    o_bias=False,
    windows="layers",
    rope_theta=1_000_000.0,
    rms_norm_eps=1e-5,
    mrope="split",
)
_QWEN3_VL = Architecture(
    qk_norm=True,
    head_dim=128,
    max_position_embeddings=128_000,
    rope_theta=500_000.0,
    mrope="interleaved",
    mrope_section=(24, 20, 20),
)
_GLM4V = {
    "glm4v_text": replace(
        ARCHITECTURES["Glm4ForCausalLM"],
        qkv_bias_field=None,
        head_dim=None,
        max_position_embeddings=32768,
        partial_rotary=1.0,
        rms_norm_eps=1e-5,
        mrope="split",
        mrope_section=(8, 12, 12),
    )
}
_GLM4V_MOE = replace(
    _GLM4_MOE,
    qkv_bias=True,
    qkv_bias_field="attention_bias",
    qk_norm_field=None,
    max_position_embeddings=65536,
    mrope="split",
    mrope_section=(8, 12, 12),
    draft_layers=0,
)
# Kimi K2.5's decoder, under its published and its transformers name.
_KIMI = dict.fromkeys(("kimi_k2", "deepseek_v3"), ARCHITECTURES["DeepseekV3ForCausalLM"])
# The decoders of multimodal models by their text_config's model_type; the first if it has none.
MULTIMODAL: dict[str, dict[str, Architecture]] = {
    "ColQwen2ForRetrieval": {"qwen2_vl_text": _QWEN2_VL},
    "Gemma3ForConditionalGeneration": {"gemma3_text": ARCHITECTURES["Gemma3ForCausalLM"]},
    "Glm4vForConditionalGeneration": _GLM4V,
    "Glm4vMoeForConditionalGeneration": {"glm4v_moe_text": _GLM4V_MOE},
    "Glm46VForConditionalGeneration": _GLM4V,
    "Idefics3ForConditionalGeneration": {"llama": ARCHITECTURES["LlamaForCausalLM"]},
    "KimiK25ForConditionalGeneration": _KIMI,
    "Kimi_K25ForConditionalGeneration": _KIMI,
    "Llama4ForConditionalGeneration": {"llama4_text": ARCHITECTURES["Llama4ForCausalLM"]},
    "LlavaOnevisionForConditionalGeneration": {"qwen2": ARCHITECTURES["Qwen2ForCausalLM"]},
    "Mistral3ForConditionalGeneration": {
        "mistral": ARCHITECTURES["MistralForCausalLM"],
        "ministral3": ARCHITECTURES["Ministral3ForCausalLM"],
    },
    "SmolVLMForConditionalGeneration": {"llama": ARCHITECTURES["LlamaForCausalLM"]},
    "Qwen2VLForConditionalGeneration": {"qwen2_vl_text": _QWEN2_VL},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": _QWEN2_VL},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": _QWEN3_VL},
}


def keeps_latents(architecture: str) -> bool:
    """Whether the native implementation of an architecture attends to latents."""
    if architecture in _LATENT_RECURRENT:
        return True
    return any(found.latents is not None for found in _native(architecture))


def attends_in_chunks(architecture: str) -> bool:
    """Whether some layers of an architecture's native implementation attend in chunks."""
    return any(found.windows == "chunked" for found in _native(architecture))


def _native(architecture: str) -> list[Architecture]:
    """What an architecture's native implementation may be: a multimodal one has several."""
    own = ARCHITECTURES.get(architecture)
    return [*([] if own is None else [own]), *MULTIMODAL.get(architecture, {}).values()]
