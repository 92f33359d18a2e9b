"""The families of decoders that the native implementation knows, as differences between them.

Defaults for absent fields of config.json are those of transformers' config classes. What a family
does not name here it does as Llama does.
"""

from dataclasses import dataclass, replace
from typing import Literal

# Which layers slide: none; all; all where use_sliding_window says so (switched); with that switch
# those that layer_types or max_window_layers names (layers) or layer_types alone (named); those
# that layer_types names, or all but every n-th (interleaved).
Windows = Literal["none", "all", "switched", "layers", "named", "interleaved"]
# How a checkpoint names and cuts its matrices.
TensorLayout = Literal["llama", "phi3", "mixtral"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one family differs from the common decoder.

    `qkv_bias`, `o_bias` None follow config.json's attention_bias; `qkv_bias_field` names a field of
    its own. `gemma` stands for what all Gemmas share: norms times (1 + weight), scaled embeddings
    and a tanh GELU; `output_norms` for norms behind attention and MLP and for
    query_pre_attn_scalar. `global_every` n: where config.json does not say, every n-th layer sees
    all keys. `text_part` names the decoder among a multimodal model's tensors; its fields are in
    text_config. `vocab_size`, `num_heads` and `num_kv_heads` are for fields that may be absent.
    """

    qkv_bias: bool | None = None
    qkv_bias_field: str | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    windows: Windows = "none"
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    sliding_window: int | None = None
    layout: TensorLayout = "llama"
    rope_theta: float = 10_000.0
    local_rope_theta: float | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    partial_rotary: bool = False
    gemma: bool = False
    output_norms: bool = False
    global_every: int = 2
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    experts: Literal["none", "mixtral", "qwen"] = "none"
    shared_expert: bool = False
    text_part: str = ""
    vocab_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None


_GEMMA3 = Architecture(
    qk_norm=True,
    windows="interleaved",
    head_dim=256,
    max_position_embeddings=131072,
    sliding_window=4096,
    rope_theta=1_000_000.0,
    local_rope_theta=10_000.0,
    tie_word_embeddings=True,
    gemma=True,
    output_norms=True,
    global_every=6,
    vocab_size=262_208,
    num_heads=8,
    num_kv_heads=4,
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
        partial_rotary=True,
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
        output_norms=True,
        attention_softcap=50.0,
        logits_softcap=30.0,
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA3, text_part="language_model."),
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
    "Qwen3MoeForCausalLM": Architecture(qk_norm=True, experts="qwen", windows="switched"),
}
