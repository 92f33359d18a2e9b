"""What a native decoder needs to know of a checkpoint, read from its config.json.

Defaults for absent fields are those of transformers' config classes. A value that the native
decoder cannot honour raises ConfigError naming file and field, never passes silently.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .checkpoint import Checkpoint, JsonObject

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding; `parameters` holds what the scaling of `rope_type` needs."""

    rope_type: str
    theta: float
    parameters: JsonObject


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one family differs from the common decoder.

    `qkv_bias`, `o_bias` None follow config.json's attention_bias. `windows` says which layers
    slide: none, all, or those that layer_types (or max_window_layers) names.
    """

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    windows: str = "none"
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    sliding_window: int | None = None


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
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's shape. `windows` has one entry a layer: keys it sees, self included, or None."""

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

    @classmethod
    def from_hf(cls, checkpoint: Checkpoint) -> "ModelConfig":
        """Raises ConfigError naming the first field that is missing, broken or not supported."""
        fields = _Fields(checkpoint.folder / "config.json", checkpoint.config)
        family = ARCHITECTURES.get(checkpoint.architecture)
        if family is None:
            raise fields.error("architectures", f"one of {', '.join(ARCHITECTURES)}")
        fields.require("hidden_act", ("silu", "swish"), default="silu")
        return _read(fields, family)


def _read(fields: "_Fields", family: Architecture) -> ModelConfig:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    head_dim = fields.whole("head_dim", default=family.head_dim or hidden // heads)
    kv_heads = fields.whole("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    if head_dim % 2:
        raise fields.error("head_dim", "even")
    positions = fields.whole("max_position_embeddings", default=family.max_position_embeddings)
    bias = fields.flag("attention_bias")
    return ModelConfig(
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=fields.whole("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=positions,
        rope=_rope(fields, positions),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=bias if family.o_bias is None else family.o_bias,
        mlp_bias=fields.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        windows=_windows(fields, family),
    )


def _windows(fields: "_Fields", family: Architecture) -> tuple[int | None, ...]:
    layers = fields.whole("num_hidden_layers")
    if family.windows == "none":
        return (None,) * layers
    if family.windows == "all":
        return (fields.window("sliding_window", family.sliding_window),) * layers
    window = fields.window("sliding_window", 4096) if fields.flag("use_sliding_window") else None
    first = fields.get("max_window_layers", 28)
    default = [
        "full_attention" if index < first else "sliding_attention" for index in range(layers)
    ]
    if window is None:
        default = ["full_attention"] * layers
    kinds = fields.get("layer_types", default)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error("layer_types", f"a list of {layers} names")
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", "made of full_attention and sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(fields: "_Fields", positions: int) -> RopeConfig:
    """Reads the new form (rope_parameters) and the old (rope_scaling beside rope_theta)."""
    name = "rope_scaling" if fields.get("rope_scaling", None) else "rope_parameters"
    parameters = fields.get(name, {})
    if not isinstance(parameters, dict):
        raise fields.error(name, "an object")
    rope = _Fields(fields.path, parameters, prefix=f"{name}.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise rope.error("rope_type", f"one of {', '.join(ROPE_TYPES)}")
    for source in (rope, fields):
        source.require("partial_rotary_factor", (1, 1.0), default=1.0)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    original = fields.get("original_max_position_embeddings", None)
    merged = {"original_max_position_embeddings": positions, **parameters}
    if original is not None:
        merged["original_max_position_embeddings"] = original
    _check_scaling(_Fields(fields.path, merged, prefix=f"{name}."), kind)
    return RopeConfig(kind, theta, merged)


def _check_scaling(rope: "_Fields", kind: str) -> None:
    needed = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "yarn": ("factor", "original_max_position_embeddings"),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
    }
    for name in needed.get(kind, ()):
        rope.number(name)
    for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if rope.get(name, None) is not None:
            rope.number(name)


class _Fields:
    """Typed access to one JSON object, with errors that name file and field."""

    def __init__(self, path: Path, content: JsonObject, prefix: str = "") -> None:
        self.path, self._content, self._prefix = path, content, prefix

    def get(self, name: str, default: Any) -> Any:
        value = self._content.get(name)
        return default if value is None else value

    def error(self, name: str, wanted: str) -> ConfigError:
        value = self._content.get(name)
        return ConfigError(f"{self.path}: {self._prefix}{name} must be {wanted}, not {value!r:.80}")

    def require(self, name: str, allowed: tuple[Any, ...], default: Any) -> None:
        if self.get(name, default) not in allowed:
            raise self.error(name, f"one of {', '.join(map(str, allowed))} for the native decoder")

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.error(name, "a whole number above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.error(name, "a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def window(self, name: str, default: int | None) -> int | None:
        """A present null switches the window off; only an absent field takes the default."""
        if name not in self._content:
            return default
        return None if self._content[name] is None else self.whole(name)
