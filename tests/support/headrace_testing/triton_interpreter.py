"""Adds to Triton's interpreter, for tests of kernels on CPU tensors: correct bfloat16, products
whose sums have one order, and less work for each launch.

The interpreter represents bfloat16 numbers by integers, rounds towards zero where GPUs round to the
nearest, and would multiply the integers. It multiplies tiles with the BLAS of the host: on some
CPUs the bits of a row then depend on the number of rows, whatever the kernel does. It replaces the
functions of Triton's language for each launch and for each call of a device function, and looks for
overflows of integers that it does not report. Both take more than half of the time of most tests.
Most of the rest is the description of tiles, whose types and shapes are computed anew for every
operation, and the calls of functions that only pass on their arguments.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

Builder = interpreter.InterpreterBuilder
semantic = interpreter.interpreter_semantic
KEPT = 4096  # types of tiles
Numbers = npt.NDArray[Any]


def correct_arithmetic(patch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter convert from float32 and multiply tiles as a GPU does."""
    cast_impl = Builder.cast_impl

    def cast(builder: Any, source: Any, kind: Any) -> Any:
        given, wanted = source.dtype.scalar, kind.scalar
        if given == tl.float32 and wanted == tl.bfloat16:
            return interpreter.TensorHandle(_nearest(source.data), tl.bfloat16)
        if given == tl.bfloat16 and wanted == tl.float32:
            return interpreter.TensorHandle(_widened(source.data), tl.float32)
        return cast_impl(builder, source, kind)

    patch.setattr(Builder, "create_dot", _dot)
    patch.setattr(Builder, "cast_impl", cast)


def save_work(patch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter replace the language's functions when a kernel first needs them; they
    stay replaced. Conditions that only `debug` would check are not computed."""
    patch_lang = interpreter._patch_lang
    patched: set[Any] = set()

    def patch_new(fn: Any) -> Any:
        if fn not in patched:
            patched.add(fn)
            patch_lang(fn)
        return interpreter._LangPatchScope()  # restores nothing

    patch.setattr(interpreter, "_patch_lang", patch_new)
    patch.setattr(interpreter, "_patch_attr", _patch_builtin)
    patch.setattr(interpreter.TensorHandle, "__init__", _describe_handle)
    patch.setattr(Builder, "binary_op", _binary_op)
    patch.setattr(interpreter, "_get_np_dtype", _numpy_dtypes(interpreter._get_np_dtype))
    builder = interpreter.interpreter_builder
    checked = builder.options.debug
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=checked))
    _save_types(patch)


def _patch_builtin(owner: Any, name: str, member: Any, _: Any, scope: Any) -> None:
    """Replaces a function of the language by the one that it wraps, with the interpreter's
    semantics."""
    function = inspect.unwrap(member)

    def interpreted(*given: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return function(*given, **named)

    scope.set_attr(owner, name, interpreted)


def _describe_handle(handle: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    """Without a check of the sizes of the numbers, which are right where operations make them."""
    handle.data, handle.dtype, handle.attr = data, dtype, attr or {}


def _binary_op(_: Any, left: Any, right: Any, operation: Callable[[Any, Any], Any]) -> Any:
    data, kind = operation(left.data, right.data), left.dtype.scalar
    known = data.dtype is left.data.dtype
    if not known and not interpreter._validate_np_data_size(data, kind):
        data = data.astype(interpreter._get_np_dtype(kind))
    return interpreter.TensorHandle(data, kind)


def _save_types(patch: pytest.MonkeyPatch) -> None:
    """Computes what describes a tile once for each type and shape."""
    patch.setattr(tl.core, "_unwrap_if_constexpr", _unwrapped(tl.core._unwrap_if_constexpr))
    patch.setattr(tl.block_type, "__init__", _block_types(tl.block_type.__init__))
    patch.setattr(tl.tensor, "__init__", _tensors(tl.tensor.__init__))
    patch.setattr(semantic, "broadcast_impl_value", _broadcast(semantic.broadcast_impl_value))
    patch.setattr(semantic, "computation_type_impl", cache(semantic.computation_type_impl))
    # Tensors are on the CPU, where each launch would copy their storage onto itself.
    patch.setattr(
        interpreter.GridExecutor, "_init_args_hst", lambda _, given, named: (given, named)
    )
    patch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)


def _unwrapped(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`unwrap` that returns numbers at once."""

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is int:
            return value
        return value.value if kind is tl.constexpr else unwrap(value)

    return unwrapped


def _block_types(describe: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """The initialisation of types of tiles, with their shapes and names cached."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def initialise(block: Any, element: Any, shape: Any) -> None:
        extents = [one.value if type(one) is tl.constexpr else one for one in shape]
        key = (id(element), *extents)
        found = known.get(key)
        if found is None:
            describe(block, element, shape)
            if len(known) >= KEPT:  # each launch has pointer types of its own
                known.clear()
            known[key] = dict(block.__dict__)  # has the element, whose id thereby stays its own
        else:
            block.__dict__.update(found)

    return initialise


def _tensors(describe: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """The initialisation of tiles and scalars, with what follows from the shape cached."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def initialise(tensor: Any, handle: Any, kind: Any) -> None:
        extents = tuple(kind.shape.values) if kind.is_block() else ()
        found = known.get(extents)
        if found is None:
            describe(tensor, handle, kind)
            known[extents] = tensor.numel, tensor.shape
        else:
            tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
            tensor.numel, tensor.shape = found

    return initialise


def _broadcast(broadcast: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`broadcast` that makes tiles of one shape from two of the same rank, or from a tile and a
    scalar, without describing them anew."""

    def fitted(left: Any, right: Any) -> Any:
        one, other = left.type, right.type
        if not one.is_block() or not other.is_block():
            if one.is_block():
                return left, _spread(right, one.shape)
            return (_spread(left, other.shape), right) if other.is_block() else (left, right)
        shape, second = one.shape.values, other.shape.values
        if shape == second:
            return left, right
        if len(shape) != len(second):
            return broadcast(left, right)
        whole = _common_shape(tuple(shape), tuple(second))
        return (
            left if shape == whole else _spread(left, whole),
            right if second == whole else _spread(right, whole),
        )

    return fitted


@cache
def _common_shape(one: tuple[int, ...], other: tuple[int, ...]) -> list[int]:
    return list(np.broadcast_shapes(one, other))


def _spread(tile: Any, shape: Any) -> Any:
    """The numbers of a tile or scalar in a larger tile."""
    numbers = tile.handle.data
    data = np.empty(tuple(shape), dtype=numbers.dtype)
    data[...] = numbers
    kind = tl.block_type(tile.type.scalar, shape)
    return tl.tensor(interpreter.TensorHandle(data, tile.handle.dtype.scalar), kind)


def _numpy_dtypes(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`find` with the dtypes of scalars and of blocks of them cached."""
    known = cache(find)
    pointers = find(tl.pointer_type(tl.float32))

    def found(kind: Any) -> Any:
        scalar = kind.scalar
        return pointers if isinstance(scalar, tl.pointer_type) else known(scalar)

    return found


def _dot(_: Any, a: Any, b: Any, added: Any, *precision: Any) -> Any:
    product = ordered_product(_numbers(a), _numbers(b), added.data.dtype)
    # Summed separately, so that the depth of the tiles affects the bits.
    return interpreter.TensorHandle(product + added.data, added.dtype.scalar)


def ordered_product(a: Numbers, b: Numbers, dtype: npt.DTypeLike) -> Numbers:
    """[..., rows, inputs] by [..., inputs, columns]. The products of a row and a column are added
    pairwise, one half to the other, until one is left, so that a number depends only on that row,
    that column and the size of the tiles."""
    order = _order(*a.shape[-2:], b.shape[-1])
    columns = np.moveaxis(a.astype(dtype), -1, 0)[order]
    parts: Numbers = columns[..., None] * np.moveaxis(b.astype(dtype), -2, 0)[order][..., None, :]
    while len(parts) > 1:
        half, odd = divmod(len(parts), 2)
        if odd:
            parts[0] += parts[-1]
        parts[:half] += parts[half : 2 * half]
        parts = parts[:half]
    total: Numbers = parts[0]
    return total


@cache
def _order(rows: int, inputs: int, columns: int) -> npt.NDArray[np.intp]:
    """Tiles of another size add in another order, as they may on a device."""
    return np.random.default_rng((rows, inputs, columns)).permutation(inputs)


def nearly_cancel(rows: torch.Tensor, weight: torch.Tensor) -> None:
    """Changes rows [T, in] and weight [out, in] so that the order of sums affects 16-bit results:
    the second half of the inputs nearly cancels the first half."""
    half, step = rows.shape[1] // 2, torch.finfo(rows.dtype).eps
    weight[:, half:] = weight[:, :half].flip(1)
    rows[:, half:] = -rows[:, :half].flip(1) * (1 + step)


def _numbers(tile: Any) -> Numbers:
    """A tile's numbers in a dtype that numpy multiplies."""
    data: Numbers = tile.data
    if tile.dtype.scalar == tl.bfloat16:
        return _widened(data)
    if tile.dtype.is_floating() and tile.dtype.primitive_bitwidth == 8:
        half: Numbers = interpreter._convert_float(data, tile.dtype, tl.float16, None)
        return half.view(np.float16)
    return data


def _widened(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The numbers of bits in bfloat16."""
    wide: npt.NDArray[np.float32] = (bits.astype(np.uint32) << 16).view(np.float32)
    return wide


def _nearest(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of finite numbers in bfloat16, rounded half to even."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return rounded
