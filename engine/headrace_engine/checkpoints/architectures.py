"""The families of decoders that the native implementation supports, as differences between them.

Defaults for absent fields of config.json are those of transformers' config classes. Where a family
names no difference, it is like Llama.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

# Which layers have a sliding window: none; all; all if use_sliding_window is set (switched). With
# that switch: the layers of layer_types or max_window_layers (layers), or of layer_types alone
# (named). Without it: the layers of layer_types (typed), or else all but every n-th (interleaved).
Windows = Literal["none", "all", "switched", "layers", "named", "typed", "interleaved"]
# Where a layer has norms: before attention and MLP, before and after them, or only after them.
Norms = Literal["before", "around", "after"]
# Which layers are not rotated: none; those with a 0 in no_rope_layers, or every n-th (listed);
# those without a window if other layers have one (global).
Unrotated = Literal["none", "listed", "global"]
# How a checkpoint names and splits its matrices.
TensorLayout = Literal["llama", "phi3", "mixtral", "glm", "glm4", "gptoss"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one family differs from the common decoder.

    `qkv_bias`, `o_bias` None follow config.json's attention_bias; `qkv_bias_field`, `o_bias_field`
    name fields of their own. `gemma` stands for what all Gemmas share: norms times (1 + weight),
    scaled embeddings, a tanh GELU, and query_pre_attn_scalar if there are norms before and after.
    `wide_qk_norm`: Q and K norms cover all heads together. `partial_rotary` is the share of a head
    that is rotated if config.json has none; None: always all of it. `interleaved` rotation pairs
    neighbours. `scaled_queries`: scaled by position, as in llama_4_scaling_beta. `multipliers`:
    Granite's four fields. `global_every` n: every n-th layer sees all keys if config.json does not
    say. `vocab_size`, `num_heads` and `num_kv_heads` replace absent fields.
    """

    qkv_bias: bool | None = None
    qkv_bias_field: str | None = None
    o_bias: bool | None = None
    o_bias_field: str | None = None
    mlp_bias_field: str = "mlp_bias"
    qk_norm: bool = False
    wide_qk_norm: bool = False
    windows: Windows = "none"
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    sliding_window: int | None = None
    layout: TensorLayout = "llama"
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, str | float | bool] = field(default_factory=dict)
    local_rope_theta: float | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    partial_rotary: float | None = None
    interleaved: bool = False
    unrotated: Unrotated = "none"
    scaled_queries: bool = False
    multipliers: bool = False
    gemma: bool = False
    norms: Norms = "before"
    global_every: int = 2
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    experts: Literal["none", "mixtral", "qwen", "gptoss"] = "none"
    sinks: bool = False
    shared_expert: bool = False
    vocab_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None


# The decoders with recurrent layers; models.hybrid reads their config.json.
RECURRENT = (
    "GraniteMoeHybridForCausalLM",
    "Lfm2ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
)
# The decoders of multimodal models by their text_config's model_type; the first if it has none.
MULTIMODAL: dict[str, dict[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
}
# The prefix of their decoders' tensors.
TEXT_PART = "language_model."

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

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(max_position_embeddings=2048),
    "MistralForCausalLM": Architecture(
        qkv_bias=False,
        o_bias=False,
        windows="all",
        max_position_embeddings=131072,
        sliding_window=4096,
    ),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, o_bias=False, windows="layers"),
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
    "Ministral3ForCausalLM": Architecture(
        qkv_bias=False,
        o_bias=False,
        windows="all",
        head_dim=128,
        num_kv_heads=8,
        max_position_embeddings=262144,
        scaled_queries=True,
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
    "Ernie4_5ForCausalLM": Architecture(
        qkv_bias=False,
        qkv_bias_field="use_bias",
        o_bias=False,
        o_bias_field="use_bias",
        mlp_bias_field="use_bias",
        head_dim=128,
        num_kv_heads=2,
        max_position_embeddings=131072,
        interleaved=True,
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "MixtralForCausalLM": Architecture(
        qkv_bias=False,
        o_bias=False,
        windows="all",
        max_position_embeddings=131072,
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
        sinks=True,
    ),
    "Qwen3MoeForCausalLM": Architecture(qk_norm=True, experts="qwen", windows="switched"),
}
