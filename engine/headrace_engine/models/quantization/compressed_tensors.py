"""compressed-tensors checkpoints (llm-compressor): weights in 4-bit or 8-bit integers, or fp8.

Only the weights' quantisation is used: the engine decides whether activations are rounded. Sparse
formats, and integers with block scales, are refused.
"""

from collections.abc import Mapping
from math import prod
from typing import ClassVar

import torch

from ...checkpoints.fields import Fields
from ...checkpoints.tensor_files import Shape, TensorFiles
from ...core.errors import CheckpointError
from ...layers.float8_weight import Float8Weight
from ...layers.quantized_weight import WORD_BITS, QuantizedWeight, unpack_columns, unpack_rows
from .base import FLOATS, StoredWeight, TensorSpec, read_groups

PACKED, UNPACKED, FLOAT = "pack-quantized", ("int-quantized", "naive-quantized"), "float-quantized"
STRATEGIES = ("tensor", "channel", "group")
BLOCK = "block"


class CompressedTensors:
    name: ClassVar[str] = "compressed-tensors"
    integer_weights: bool

    def __init__(self, fields: Fields) -> None:
        weights = _weights(fields)
        kind = "float" if fields.get("format", "") == FLOAT else "int"
        weights.require("type", (kind,), default="int")
        strategies = STRATEGIES if kind == "int" else (*STRATEGIES, BLOCK)
        weights.require("strategy", strategies, default="channel")
        weights.require("num_bits", (8,) if kind == "float" else (4, 8), default=8)
        self.integer_weights = kind == "int"
        self._bits: int = weights.get("num_bits", 8)
        self._strategy: str = weights.get("strategy", "channel")
        self._group_size = weights.integer("group_size") if self._strategy == "group" else 0
        self._block_rows = 1
        if self._strategy == BLOCK:
            self._block_rows, self._group_size = map(int, weights.numbers("block_structure", 2))
        self._packed = fields.get("format", "") == PACKED
        self._symmetric = weights.flag("symmetric", True)

    def stores(self, module: str, files: TensorFiles) -> bool:
        return f"{module}.weight_scale" in files.tensors

    def tensors(self, module: str, shape: Shape, files: TensorFiles) -> Mapping[str, TensorSpec]:
        """For [experts, out, in] each tensor has that dimension, too."""
        *stacked, out, inputs = shape
        found = self._tensors_of(module, (out, inputs), files)
        if not stacked:
            return found
        if self._strategy == BLOCK:
            raise CheckpointError(
                f"{files.folder}: {module} has all experts in one tensor, with scales of blocks: "
                "use a checkpoint with scales of channels or groups"
            )
        return {
            name: TensorSpec(tuple((*stacked, *one) for one in spec.shapes), spec.dtypes)
            for name, spec in found.items()
        }

    def _tensors_of(
        self, module: str, shape: tuple[int, int], files: TensorFiles
    ) -> dict[str, TensorSpec]:
        out, inputs = shape
        scales = TensorSpec(self._scale_shapes(shape), FLOATS)
        found = {f"{module}.weight_scale": scales}
        if self._packed:
            words = -(-inputs * self._bits // WORD_BITS)
            found[f"{module}.weight_packed"] = TensorSpec(((out, words),), ("I32",))
        else:
            dtypes = ("I8",) if self.integer_weights else ("F8_E4M3",)
            found[f"{module}.weight"] = TensorSpec((shape,), dtypes)
        if not self._symmetric:
            found[f"{module}.weight_zero_point"] = self._zero_point_spec(shape)
        if f"{module}.weight_g_idx" in files.tensors:
            found[f"{module}.weight_g_idx"] = TensorSpec(((inputs,),), ("I32", "I64"))
        return found

    def read(self, module: str, shape: Shape, files: TensorFiles) -> StoredWeight:
        """Reads the weight; of [experts, out, in] as [experts * out, in]."""
        out, inputs = prod(shape[:-1]), shape[-1]
        scales = (
            files.load(f"{module}.weight_scale").float().reshape(-1, self._groups_per_row(inputs))
        )
        scales = (
            scales.repeat_interleave(self._block_rows, dim=0)[:out].expand(out, -1).contiguous()
        )
        if not self.integer_weights:
            values = files.load(f"{module}.weight").view(out, inputs)
            return Float8Weight(values, scales, self._group_size or inputs)
        midpoint = 1 << (self._bits - 1)
        if self._packed:
            packed = files.load(f"{module}.weight_packed")
            values = unpack_columns(packed.view(out, -1), self._bits)[:, :inputs]
        else:
            stored = files.load(f"{module}.weight").view(out, inputs)
            values = (stored.short() + midpoint).to(torch.uint8)
        return QuantizedWeight(
            values=values.contiguous(),
            scales=scales,
            zeros=self._zero_points(module, (out, inputs), files) + torch.zeros_like(scales),
            groups=read_groups(f"{module}.weight_g_idx", inputs, scales.shape[1], files),
            bits=self._bits,
        )

    def _zero_points(self, module: str, shape: Shape, files: TensorFiles) -> torch.Tensor:
        """Zero points for unsigned values; the checkpoint stores those of signed values."""
        midpoint = 1 << (self._bits - 1)
        if self._symmetric:
            return torch.tensor(float(midpoint))
        stored = files.load(f"{module}.weight_zero_point")
        if stored.dtype is torch.int32 and self._packed:
            return unpack_rows(stored.flatten(0, -2), self._bits)[: shape[0]].float()
        return stored.float().reshape(-1, self._groups_per_row(shape[1])) + midpoint

    def _zero_point_spec(self, shape: Shape) -> TensorSpec:
        plain = self._scale_shapes(shape)
        packed = tuple((-(-one[0] * self._bits // WORD_BITS), *one[1:]) for one in plain if one)
        return TensorSpec((*plain, *packed), ("I8", "I32"))

    def _scale_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        if self._strategy == "tensor":
            return ((), (1,), (1, 1))
        if self._strategy == "channel":
            return ((shape[0], 1), (shape[0],))
        return ((-(-shape[0] // self._block_rows), self._groups_per_row(shape[1])),)

    def _groups_per_row(self, inputs: int) -> int:
        return -(-inputs // self._group_size) if self._group_size else 1


def _weights(fields: Fields) -> Fields:
    """The scheme of the one supported group."""
    fields.require("format", (PACKED, *UNPACKED, FLOAT), default=PACKED)
    groups = fields.object("config_groups")
    if len(groups) != 1:
        raise fields.error("config_groups", "one group of layers")
    name = next(iter(groups))
    inner = Fields(fields.path, groups, prefix="quantization_config.config_groups.")
    prefix = f"quantization_config.config_groups.{name}."
    group = Fields(fields.path, inner.object(name), prefix=prefix)
    return Fields(fields.path, group.object("weights"), prefix=f"{prefix}weights.")
