"""A step's arrays on their way to the device. Left out: a GPU's own copies and streams."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace_engine.device.transfer import (
    ALIGNMENT,
    Transfer,
    all_to_host,
    pack,
    packed_size,
    shared_storage,
    storage_views,
    to_device,
    to_host,
    unpack,
)

ARRAYS: tuple[npt.NDArray[Any], ...] = (
    np.arange(5, dtype=np.int32),
    np.arange(12, dtype=np.int32).reshape(3, 4)[:, :3],
    np.arange(3, dtype=np.int64),
    np.zeros((0,), dtype=np.int64),
    np.array([2.5], dtype=np.float32),
)


def test_packed_arrays_are_unpacked_unchanged() -> None:
    packed = torch.empty(packed_size(ARRAYS), dtype=torch.uint8)
    pack(ARRAYS, packed)
    for array, tensor in zip(ARRAYS, unpack(packed, ARRAYS), strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert (tensor.data_ptr() - packed.data_ptr()) % ALIGNMENT == 0 or not array.size


def test_a_cpu_gets_the_arrays_themselves() -> None:
    device = torch.device("cpu")
    for array, tensor in zip(ARRAYS, Transfer(device)(ARRAYS), strict=True):
        assert tensor.data_ptr() == array.ctypes.data or not array.size
    tensor = to_device(ARRAYS[0], device)
    assert tensor.data_ptr() == ARRAYS[0].ctypes.data
    assert to_host(tensor) is tensor
    assert all_to_host((tensor,))[0] is tensor


def test_parts_of_one_piece_of_memory_are_copied_at_once() -> None:
    room = torch.arange(30, dtype=torch.uint8)
    parts = room[:24].view(torch.int64), room[24:].view(torch.bfloat16)
    whole = shared_storage(parts)
    assert whole is not None and torch.equal(whole, room)
    for found, part in zip(storage_views(whole.clone(), parts), parts, strict=True):
        assert found.dtype == part.dtype and torch.equal(found, part)
    assert shared_storage(parts[:1]) is None, "the memory has more than that"
    assert shared_storage((parts[0], torch.zeros(3, dtype=torch.bfloat16))) is None
    assert shared_storage((room[::2], room[1::2])) is None
