"""Which matrices of a decoder adapters may change, and where each lies in our merged layers.

Query, key and value are one layer here and so are gate and up; adapters name them one by one, or
merged where the checkpoint itself has them so. A rank has a part of each, as it has of the model.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch

from ..model.config import ExpertsConfig, ModelConfig

LinearName = Literal[
    "qkv", "o", "gate_up", "down",
    "shared_gate_up", "shared_down", "shared_gate",
    "router", "experts_gate_up", "experts_down",
]  # fmt: skip
# Modules of all experts of a mixture together, whose matrices have one dimension more.
EXPERTS_GATE_UP, EXPERTS_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"

# [start, stop)
Run = tuple[int, int]
# Which outputs and which inputs of a matrix [out, in], by its usual name, are in this process.
Cut = Callable[[str, tuple[int, int]], tuple[Run, Run]]


@dataclass(frozen=True, slots=True)
class Held:
    """Those of `total` inputs or outputs of a module that are here: runs, one behind the other."""

    total: int
    runs: tuple[Run, ...]

    @property
    def width(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Their columns of a tensor [..., total]."""
        parts = [whole[..., start:stop] for start, stop in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


@dataclass(frozen=True, slots=True)
class Columns:
    """Outputs [start, start + width) of a merged layer, and which of a module's they are."""

    start: int
    width: int
    held: Held


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A layer of our decoder, and the modules of a checkpoint that it is made of. `inputs` and
    `outputs` are those that are here; `held` tells which inputs. With `experts` above 0 it is so
    many layers of this shape, one for each."""

    inputs: int
    outputs: int
    parts: Mapping[str, Columns]
    held: Held
    experts: int = 0


# One entry a decoder layer.
LayerShapes = Mapping[LinearName, LinearShape]


@runtime_checkable
class AdaptableModel(Protocol):
    """A model whose `forward` heeds ForwardBatch.lora."""

    @property
    def lora_shapes(self) -> tuple[LayerShapes, ...]: ...


def _whole(_: str, shape: tuple[int, int]) -> tuple[Run, Run]:
    return (0, shape[0]), (0, shape[1])


def lora_shapes(config: ModelConfig, cut: Cut = _whole) -> tuple[LayerShapes, ...]:
    """Of each layer."""
    return tuple(_layer(config, index, cut) for index in range(config.num_layers))


def _layer(config: ModelConfig, index: int, cut: Cut) -> LayerShapes:
    hidden = config.hidden_size
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = {"q_proj": heads, "k_proj": kv, "v_proj": kv}
    shapes: dict[LinearName, LinearShape] = {
        "qkv": _linear(hidden, qkv, "self_attn", cut, "qkv_proj" if config.merged_qkv else None),
        "o": _linear(heads, {"o_proj": hidden}, "self_attn", cut),
    }
    experts = config.experts
    if experts is not None and experts.sparse[index]:
        # Those of gpt-oss are one module with gates and ups in turns, which no adapter is told by.
        shapes |= {} if experts.swiglu is not None else mixture_shapes(hidden, experts, cut)
    else:
        inner = config.intermediate_size
        gated = {"gate_proj": inner, "up_proj": inner}
        merged = "gate_up_proj" if config.merged_gate_up else None
        shapes["gate_up"] = _linear(hidden, gated, "mlp", cut, merged)
        shapes["down"] = _linear(inner, {"down_proj": hidden}, "mlp", cut)
    return shapes


def mixture_shapes(
    hidden: int, experts: ExpertsConfig, cut: Cut = _whole
) -> dict[LinearName, LinearShape]:
    """Of a mixture in the place of an MLP."""
    inner, shared = experts.intermediate_size, experts.shared_size
    block = "mlp.experts.0"
    upper = _linear(hidden, {"gate_proj": inner, "up_proj": inner}, block, cut, "gate_up_proj")
    lower = _linear(inner, {"down_proj": hidden}, block, cut)
    shapes: dict[LinearName, LinearShape] = {
        "experts_gate_up": _of_all(upper, EXPERTS_GATE_UP, experts.count),
        "experts_down": _of_all(lower, EXPERTS_DOWN, experts.count),
        "router": _linear(hidden, {"gate": experts.count}, "mlp", cut),
    }
    if shared is not None:
        block = "mlp.shared_expert"
        gated = {"gate_proj": shared, "up_proj": shared}
        shapes["shared_gate_up"] = _linear(hidden, gated, block, cut)
        shapes["shared_down"] = _linear(shared, {"down_proj": hidden}, block, cut)
        shapes["shared_gate"] = _linear(hidden, {"shared_expert_gate": 1}, "mlp", cut)
    return shapes


def _of_all(one: LinearShape, name: str, count: int) -> LinearShape:
    (columns,) = one.parts.values()
    return replace(one, parts={name: columns}, experts=count)


def without_experts(shapes: Iterable[LayerShapes]) -> tuple[LayerShapes, ...]:
    return tuple(
        {name: shape for name, shape in layer.items() if not shape.experts} for layer in shapes
    )


def linear_shape(inputs: int, widths: Mapping[str, int], block: str) -> LinearShape:
    """A layer of whole modules of these widths, by their names in a `block` of the checkpoint."""
    return _linear(inputs, widths, block, _whole)


def _linear(
    inputs: int, widths: Mapping[str, int], block: str, cut: Cut, merged: str | None = None
) -> LinearShape:
    """`merged` names the one module that the checkpoint has in the place of those."""
    held: dict[str, Held] = {}
    columns: Run = (0, inputs)
    for name, width in widths.items():
        rows, columns = cut(f"{block}.{name}.weight", (width, inputs))
        held[name] = Held(width, (rows,))
    if merged is not None:
        held = {merged: _joined(held.values())}
    parts: dict[str, Columns] = {}
    outputs = 0
    for name, own in held.items():
        parts[f"{block}.{name}"] = Columns(outputs, own.width, own)
        outputs += own.width
    taken = Held(inputs, (columns,))
    return LinearShape(taken.width, outputs, parts, taken)


def _joined(modules: Iterable[Held]) -> Held:
    """Of modules that lie one behind the other."""
    runs: list[Run] = []
    total = 0
    for module in modules:
        runs += [(total + start, total + stop) for start, stop in module.runs]
        total += module.total
    return Held(total, tuple(runs))
