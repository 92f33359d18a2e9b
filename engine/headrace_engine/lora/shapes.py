"""The matrices of a decoder that adapters may change, and their places in our merged layers.

Query, key and value are one layer here, and so are gate and up; adapters name them one by one, or
merged if the checkpoint merges them. A rank has a part of each adapter matrix, as it has of each
weight of the model.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NewType, Protocol, runtime_checkable

import torch

from ..checkpoints.config import ExpertsConfig, LatentConfig, ModelConfig

# The first of a layer's modules, by Llama's name: hybrid decoders name most layers so.
ModuleName = NewType("ModuleName", str)
LinearName = (
    Literal[
        "qkv", "query_up", "o", "gate_up", "down",
        "shared_gate_up", "shared_down", "shared_gate",
        "router", "experts_gate_up", "experts_down",
    ]
    | ModuleName
)  # fmt: skip
# Modules of all experts of a mixture, whose matrices have one more dimension.
EXPERTS_GATE_UP, EXPERTS_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"

# [start, stop)
Run = tuple[int, int]
# The outputs and inputs of a matrix [out, in], by Llama's name, that are in this process.
Cut = Callable[[str, tuple[int, int]], tuple[Run, Run]]


@dataclass(frozen=True, slots=True)
class LocalPart:
    """The part of a module's `total` inputs or outputs that is in this process: runs, in order."""

    total: int
    runs: tuple[Run, ...]

    @property
    def width(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The columns of this part in a tensor [..., total]."""
        parts = [whole[..., start:stop] for start, stop in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


@dataclass(frozen=True, slots=True)
class Columns:
    """Outputs [start, start + width) of a merged layer, and which part of a module they are."""

    start: int
    width: int
    local: LocalPart


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A merged layer, and the checkpoint's modules that it consists of. `inputs` and `outputs` are
    those of this process; `local` says which inputs these are. `experts` above 0 means that many
    layers of this shape, one for each expert; those in `local_experts` are in this process. An
    expert's outputs are those of `matrices` side by side: 2 for gate and up."""

    inputs: int
    outputs: int
    parts: Mapping[str, Columns]
    local: LocalPart
    experts: int = 0
    local_experts: range = range(0)
    matrices: int = 1


# One entry for each decoder layer.
LayerShapes = Mapping[LinearName, LinearShape]


@runtime_checkable
class AdaptableModel(Protocol):
    """A model whose `forward` applies ForwardBatch.lora."""

    @property
    def lora_shapes(self) -> tuple[LayerShapes, ...]: ...


def _whole(_: str, shape: tuple[int, int]) -> tuple[Run, Run]:
    return (0, shape[0]), (0, shape[1])


def lora_shapes(config: ModelConfig, cut: Cut = _whole) -> tuple[LayerShapes, ...]:
    """The shapes of each layer. None where two layers are numbered as one in a checkpoint, so that
    the names in adapters are others."""
    if config.experts is not None and config.experts.shortcut:
        return ()
    return tuple(_layer(config, index, cut) for index in range(config.num_layers))


def _layer(config: ModelConfig, index: int, whole_cut: Cut) -> LayerShapes:
    hidden = config.hidden_size

    def cut(name: str, shape: tuple[int, int]) -> tuple[Run, Run]:
        return whole_cut(f"model.layers.{index}.{name}", shape)

    shapes = (
        _latent_shapes(config, config.latent, cut)
        if config.latent
        else _attention(config, index, cut)
    )
    experts = config.experts
    if experts is not None and experts.sparse[index]:
        # In gpt-oss's experts gates and ups are interleaved in one module; adapters do not name
        # them.
        if experts.swiglu is None:
            shapes |= mixture_shapes(hidden, experts, cut)
    else:
        inner = config.intermediate_size
        gated = {"gate_proj": inner, "up_proj": inner}
        merged = "gate_up_proj" if config.merged_gate_up else None
        shapes["gate_up"] = _linear(hidden, gated, "mlp", cut, merged)
        shapes["down"] = _linear(inner, {"down_proj": hidden}, "mlp", cut)
    return shapes


def _attention(config: ModelConfig, index: int, cut: Cut) -> dict[LinearName, LinearShape]:
    hidden, dim, width = config.hidden_size, config.head_dim, config.value_width
    heads, kv = config.num_heads, config.kv_heads(index)
    qkv = {"q_proj": heads * dim, "k_proj": kv * dim, "v_proj": kv * width}
    return {
        "qkv": _linear(hidden, qkv, "self_attn", cut, "qkv_proj" if config.merged_qkv else None),
        "o": _linear(heads * width, {"o_proj": hidden}, "self_attn", cut),
    }


def _latent_shapes(
    config: ModelConfig, latent: LatentConfig, cut: Cut
) -> dict[LinearName, LinearShape]:
    """The shapes of attention over latents.

    Without kv_b_proj, which is not a layer here: queries and results are multiplied by it.
    """
    hidden, queries = config.hidden_size, config.num_heads * latent.query_width
    first, shapes = {"q_proj": queries}, dict[LinearName, LinearShape]()
    if latent.query_rank is not None:
        first = {"q_a_proj": latent.query_rank}
        shapes["query_up"] = _linear(latent.query_rank, {"q_b_proj": queries}, "self_attn", cut)
    first["kv_a_proj_with_mqa"] = latent.width
    values = config.num_heads * latent.value
    return shapes | {
        "qkv": _linear(hidden, first, "self_attn", cut),
        "o": _linear(values, {"o_proj": hidden}, "self_attn", cut),
    }


def mixture_shapes(
    hidden: int, experts: ExpertsConfig, cut: Cut = _whole
) -> dict[LinearName, LinearShape]:
    """The shapes of a mixture that replaces an MLP."""
    inner, shared = experts.intermediate_size, experts.shared_size
    block = "mlp.experts.0"
    upper = _linear(hidden, {"gate_proj": inner, "up_proj": inner}, block, cut, "gate_up_proj")
    lower = _linear(inner, {"down_proj": hidden}, block, cut)
    shapes: dict[LinearName, LinearShape] = {
        "router": _linear(hidden, {"gate": experts.count}, "mlp", cut),
    }
    if not experts.scaled_inputs:
        shapes["experts_gate_up"] = _of_all(upper, EXPERTS_GATE_UP, experts, 2)
        shapes["experts_down"] = _of_all(lower, EXPERTS_DOWN, experts, 1)
    if shared is not None:
        block = "mlp.shared_expert"
        gated = {"gate_proj": shared, "up_proj": shared}
        shapes["shared_gate_up"] = _linear(hidden, gated, block, cut)
        shapes["shared_down"] = _linear(shared, {"down_proj": hidden}, block, cut)
        if experts.shared_gate:
            shapes["shared_gate"] = _linear(hidden, {"shared_expert_gate": 1}, "mlp", cut)
    return shapes


def _of_all(one: LinearShape, name: str, experts: ExpertsConfig, matrices: int) -> LinearShape:
    (columns,) = one.parts.values()
    return replace(
        one,
        parts={name: columns},
        experts=experts.count,
        local_experts=experts.local,
        matrices=matrices,
    )


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
    """`merged` names the one module that replaces these in the checkpoint."""
    local: dict[str, LocalPart] = {}
    columns: Run = (0, inputs)
    for name, width in widths.items():
        rows, columns = cut(f"{block}.{name}.weight", (width, inputs))
        local[name] = LocalPart(width, (rows,))
    if merged is not None:
        local = {merged: merge_parts(local.values())}
    parts: dict[str, Columns] = {}
    outputs = 0
    for name, own in local.items():
        parts[f"{block}.{name}"] = Columns(outputs, own.width, own)
        outputs += own.width
    taken = LocalPart(inputs, (columns,))
    return LinearShape(taken.width, outputs, parts, taken)


def merge_parts(modules: Iterable[LocalPart]) -> LocalPart:
    """Joins the parts of adjacent modules."""
    runs: list[Run] = []
    total = 0
    for module in modules:
        runs += [(total + start, total + stop) for start, stop in module.runs]
        total += module.total
    return LocalPart(total, tuple(runs))
