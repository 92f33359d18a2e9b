"""Which matrices of a decoder adapters may change, and where each lies in our merged layers.

Query, key and value are one layer here and so are gate and up; adapters name them one by one, or
merged where the checkpoint itself has them so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from ..model.config import ModelConfig

LinearName = Literal["qkv", "o", "gate_up", "down"]


@dataclass(frozen=True, slots=True)
class Columns:
    """Outputs [start, start + width) of a merged layer."""

    start: int
    width: int


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A layer of our decoder, and the modules of a checkpoint that it is made of."""

    inputs: int
    outputs: int
    parts: Mapping[str, Columns]


# One entry a decoder layer.
LayerShapes = Mapping[LinearName, LinearShape]


@runtime_checkable
class AdaptableModel(Protocol):
    """A model whose `forward` heeds ForwardBatch.lora."""

    @property
    def lora_shapes(self) -> tuple[LayerShapes, ...]: ...


def lora_shapes(config: ModelConfig) -> tuple[LayerShapes, ...]:
    """Of each layer; experts of a mixture and its router are not among them."""
    return tuple(_layer(config, index) for index in range(config.num_layers))


def _layer(config: ModelConfig, index: int) -> LayerShapes:
    hidden, merged = config.hidden_size, config.layout == "phi3"
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[LinearName, LinearShape] = {
        "qkv": linear_shape(
            hidden,
            {"qkv_proj": heads + 2 * kv}
            if merged
            else {"q_proj": heads, "k_proj": kv, "v_proj": kv},
            "self_attn",
        ),
        "o": linear_shape(heads, {"o_proj": hidden}, "self_attn"),
    }
    if config.experts is None or not config.experts.sparse[index]:
        inner = config.intermediate_size
        gated = {"gate_up_proj": 2 * inner} if merged else {"gate_proj": inner, "up_proj": inner}
        shapes["gate_up"] = linear_shape(hidden, gated, "mlp")
        shapes["down"] = linear_shape(inner, {"down_proj": hidden}, "mlp")
    return shapes


def linear_shape(inputs: int, widths: Mapping[str, int], block: str) -> LinearShape:
    """A layer of modules of these widths, by their names in a `block` of the checkpoint."""
    parts: dict[str, Columns] = {}
    outputs = 0
    for name, width in widths.items():
        parts[f"{block}.{name}"] = Columns(outputs, width)
        outputs += width
    return LinearShape(inputs, outputs, parts)
