"""A checkpoint's rotary embedding and its scaling, read from config.json.

Supports the new form (rope_parameters; Gemma-3 has one object for each kind of layer) and the old
one (rope_scaling beside rope_theta). Raises ConfigError for scaling that is not supported.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .architectures import Architecture
from .checkpoint import JsonObject
from .fields import Fields

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
# Old names of longrope in checkpoints of Phi-3.
_LONGROPE_NAMES = ("su", "yarn")

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "longrope": ("original_max_position_embeddings",),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary embedding; `parameters` holds the fields that the scaling of `rope_type` needs.

    `partial` is the share of a head's elements that is rotated, from the first on. Where a token
    has three positions (M-RoPE, https://arxiv.org/abs/2409.12191), `axes` says for each frequency
    which of them it rotates by; in text all three are the same.
    """

    rope_type: str
    theta: float
    parameters: JsonObject
    partial: float = 1.0
    axes: tuple[int, ...] = ()

    def rotated(self, head_dim: int) -> int:
        """The number of rotated elements of a head."""
        return int(head_dim * self.partial)


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Multiplies queries at position p by 1 + beta * log(1 + floor((p + offset) / context)) (Llama
    4), in all layers or with `unrotated` in those without rotation."""

    beta: float
    context: int
    offset: int = 0
    unrotated: bool = False


def yarn_mscale(scale: float, weight: float) -> float:
    """YaRN's factor of attention scores' temperature, https://arxiv.org/abs/2309.00071."""
    return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0


def read_query_scaling(fields: Fields, family: Architecture) -> QueryScaling | None:
    if family.scaled_queries == "none":
        return None
    if family.scaled_queries == "unrotated":
        if not fields.switch("attn_temperature_tuning", True):
            return None
        beta, context = fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192)
        return QueryScaling(beta, context, offset=1, unrotated=True)
    rope = Fields(fields.path, fields.object("rope_parameters"), prefix="rope_parameters.")
    return QueryScaling(
        beta=rope.number("llama_4_scaling_beta"),
        context=rope.integer("original_max_position_embeddings"),
    )


def read_rope(fields: Fields, family: Architecture, head_dim: int, positions: int) -> RopeConfig:
    """The rotary embedding of all layers, or of layers without a window if those differ."""
    name = "rope_scaling" if fields.get("rope_scaling", None) else "rope_parameters"
    parameters = fields.object(name) or family.rope_scaling
    if isinstance(parameters.get("full_attention"), dict):
        inner = Fields(fields.path, parameters, prefix=f"{name}.")
        parameters, name = inner.object("full_attention"), f"{name}.full_attention"
    theta = fields.number("rope_theta", family.rope_theta)
    return _read(fields, family, name, parameters, theta, head_dim, positions)


def read_local_rope(
    fields: Fields, family: Architecture, head_dim: int, positions: int
) -> RopeConfig | None:
    """The rotary embedding of layers with a window; None if all layers share one."""
    if family.local_rope_theta is None:
        return None
    parameters = Fields(fields.path, fields.object("rope_parameters"), prefix="rope_parameters.")
    theta = fields.number(family.local_rope_field, family.local_rope_theta)
    name = "rope_parameters.sliding_attention"
    local = parameters.object("sliding_attention")
    return _read(fields, family, name, local, theta, head_dim, positions)


def _read(
    fields: Fields,
    family: Architecture,
    name: str,
    parameters: JsonObject,
    theta: float,
    head_dim: int,
    positions: int,
) -> RopeConfig:
    rope = Fields(fields.path, parameters, prefix=f"{name}.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if family.layout == "phi3" and kind in _LONGROPE_NAMES:
        kind = "longrope"
    if family.mrope != "none" and kind == "mrope":
        kind = "default"
    if kind not in ROPE_TYPES:
        raise rope.error("rope_type", f"one of {', '.join(ROPE_TYPES)}")
    theta = rope.number("rope_theta", theta)
    if kind == "dynamic" and rope.get("alpha", None) is not None:
        # Hunyuan's, which is the same for all lengths.
        kind, theta = "default", theta * rope.number("alpha") ** (head_dim / (head_dim - 2))
    partial = _partial(fields, rope, family, head_dim)
    merged = _with_original(fields, parameters, positions)
    checked = Fields(fields.path, merged, prefix=f"{name}.")
    _check_scaling(checked, kind)
    found = RopeConfig(kind, theta, merged, partial)
    rotated = found.rotated(head_dim)
    if rotated % 2:
        raise rope.error("partial_rotary_factor", "such that an even number of elements is rotated")
    if family.mrope != "none":
        found = replace(found, axes=_axes(rope, family, rotated // 2))
    if kind != "longrope":
        return found
    factors = {key: checked.numbers(key, rotated // 2) for key in ("short_factor", "long_factor")}
    return replace(found, parameters={**merged, **factors})


def _axes(rope: Fields, family: Architecture, frequencies: int) -> tuple[int, ...]:
    """The position, of three, that each frequency rotates by."""
    section = rope.get("mrope_section", list(family.mrope_section))
    whole = isinstance(section, list) and all(isinstance(size, int) for size in section)
    # The default is for the usual size of heads; others are rotated as it goes.
    fits = whole and (sum(section) == frequencies or section == list(family.mrope_section))
    if not fits or len(section) != 3 or min(section) < 0:
        raise rope.error("mrope_section", f"three whole numbers that add up to {frequencies}")
    if family.mrope == "split":
        return tuple(axis for axis, size in enumerate(section) for _ in range(size))
    turns = [index % 3 if index < 3 * section[index % 3] else 0 for index in range(frequencies)]
    return tuple(turns)


def _partial(fields: Fields, rope: Fields, family: Architecture, head_dim: int) -> float:
    if family.partial_rotary is None:
        for source in (rope, fields):
            source.require("partial_rotary_factor", (1, 1.0), default=1.0)
        return 1.0
    default = family.partial_rotary
    if fields.get("rotary_dim", None) is not None:  # MiniMax-M2's checkpoints
        default = fields.integer("rotary_dim") / head_dim
    outside = fields.number("partial_rotary_factor", default)
    partial = rope.number("partial_rotary_factor", outside)
    if partial > 1.0:
        raise rope.error("partial_rotary_factor", "a number above 0 and at most 1")
    return partial


def _with_original(fields: Fields, parameters: JsonObject, positions: int) -> dict[str, Any]:
    original = fields.get("original_max_position_embeddings", None)
    merged = {"original_max_position_embeddings": positions, **parameters}
    if original is not None:
        merged["original_max_position_embeddings"] = original
    return merged


def _check_scaling(rope: Fields, kind: str) -> None:
    for name in _NEEDED.get(kind, ()):
        rope.number(name)
    optional = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    for name in (*optional, "factor"):
        if rope.get(name, None) is not None:
            rope.number(name)
