"""Matrices in the block types of GGUF files, row by row, as blocks.h names their types."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

# The kinds of panels: a type's number is its place.
FLOATS = 0
TYPES = (
    "floats", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
KINDS = {name: kind for kind, name in enumerate(TYPES) if kind != FLOATS}


class BlockMatrix(Protocol):
    """A matrix of ggml's type `kind`, one of KINDS: uint8 [out, bytes of a row]."""

    @property
    def blocks(self) -> torch.Tensor: ...

    @property
    def kind(self) -> str: ...

    @property
    def inputs(self) -> int: ...

    def chosen(self, rows: torch.Tensor) -> "BlockMatrix":
        """These rows alone."""

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """[out, in]"""


class StoredRows:
    """The stacked rows of matrices, each in blocks or in floats of `dtype`."""

    def __init__(self, parts: Sequence[BlockMatrix | torch.Tensor], dtype: torch.dtype) -> None:
        self._parts, self._dtype = parts, dtype
        stored = [part if isinstance(part, torch.Tensor) else part.blocks for part in parts]
        kinds = [FLOATS if isinstance(part, torch.Tensor) else KINDS[part.kind] for part in parts]
        counts = [len(rows) for rows in stored]
        self._starts = np.cumsum([0, *counts])
        self._kinds = np.repeat(kinds, counts)
        self._addresses = np.concatenate([row_addresses(rows) for rows in stored])
        # Rows that were dequantised, which the addresses point to.
        self._floats: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._kinds)

    @property
    def inputs(self) -> int:
        first = self._parts[0]
        return first.shape[1] if isinstance(first, torch.Tensor) else first.inputs

    def panel_kinds(self, panels: np.ndarray) -> np.ndarray:
        """The kind of each panel, a row of row numbers with -1 for padding: floats if its rows have
        several."""
        kinds = np.where(panels < 0, -1, self._kinds[panels])
        highest = kinds.max(axis=1)
        equal = ((kinds == highest[:, None]) | (kinds < 0)).all(axis=1)
        return np.where(equal, highest, FLOATS)

    def addresses(self, order: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """uint64: the address of each row of `order` as stored, or as floats where that is its
        panel's kind; 0 for padding. This object keeps the floats."""
        found = np.where(order < 0, np.uint64(0), self._addresses[order])
        for index, part in enumerate(self._parts):
            own = (order >= self._starts[index]) & (order < self._starts[index + 1])
            places = np.flatnonzero(own & (kinds == FLOATS))
            if isinstance(part, torch.Tensor) or not len(places):
                continue
            rows = torch.from_numpy(order[places] - self._starts[index])
            self._floats.append(part.chosen(rows).dequantize(self._dtype))
            found[places] = row_addresses(self._floats[-1])
        return found


def row_addresses(matrix: torch.Tensor) -> np.ndarray:
    """uint64 [rows]: the address of each row of a matrix with contiguous rows."""
    assert matrix.stride(1) == 1, "rows must be contiguous"
    step = matrix.stride(0) * matrix.element_size()
    return np.arange(matrix.shape[0], dtype=np.uint64) * np.uint64(step) + np.uint64(
        matrix.data_ptr()
    )
