"""What Triton's interpreter lacks for tests of kernels on CPU tensors: right bfloat16.

It holds such numbers as integers, rounds towards zero where GPUs round to the nearest, and would
multiply the integers.
"""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import triton.language as tl
from triton.runtime import interpreter

Builder = interpreter.InterpreterBuilder


def correct_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions from float32, and products of tiles, as a GPU computes them."""
    create_dot, cast_impl = Builder.create_dot, Builder.cast_impl

    def widened(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(builder, _widen(a), _widen(b), *rest)

    def cast(builder: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_nearest(source.data), tl.bfloat16)
        return cast_impl(builder, source, kind)

    monkeypatch.setattr(Builder, "create_dot", widened)
    monkeypatch.setattr(Builder, "cast_impl", cast)


def _widen(tile: Any) -> Any:
    if tile.dtype.scalar != tl.bfloat16:
        return tile
    wide = (tile.data.astype(np.uint32) << 16).view(np.float32)
    return dataclasses.replace(tile, data=wide, dtype=tl.float32)


def _nearest(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of finite numbers in bfloat16, halves to even."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return rounded
