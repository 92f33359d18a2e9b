"""Copies a step's arrays to the device in one asynchronous copy.

On a GPU the copy reads pinned memory and runs on a stream of its own, while the previous
step computes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Arrays begin at multiples of this many bytes, which suits every dtype.
ALIGNMENT = 16

Array = npt.NDArray[Any]


class Transfer:
    """Copies arrays to one device. On a CPU the tensors are the arrays themselves."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # torch's constructors of streams and events are not annotated.
        make_stream: Any = torch.cuda.Stream
        self._stream: Any = make_stream(device) if device.type == "cuda" else None

    def __call__(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Returns the arrays as tensors for use on the current stream."""
        if self.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        packed = torch.empty(packed_size(arrays), dtype=torch.uint8, pin_memory=True)
        pack(arrays, packed)
        return unpack(self._copy(packed), arrays)

    def _copy(self, packed: torch.Tensor) -> torch.Tensor:
        """Copies to the device; the allocator does not reuse `packed` before the copy is done."""
        with torch.cuda.stream(self._stream):
            copied = packed.to(self.device, non_blocking=True)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        copied.record_stream(current)
        return copied


def packed_size(arrays: Sequence[Array]) -> int:
    return sum(map(_padded, arrays))


def pack(arrays: Sequence[Array], packed: torch.Tensor) -> None:
    """Writes the arrays' bytes one after the other into `packed`."""
    target, begin = packed.numpy(), 0
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        target[begin : begin + flat.size] = flat
        begin += _padded(array)


def unpack(packed: torch.Tensor, arrays: Sequence[Array]) -> list[torch.Tensor]:
    """Views of `packed` with the shapes and dtypes of `arrays`."""
    found: list[torch.Tensor] = []
    begin = 0
    for array in arrays:
        dtype = torch.from_numpy(array[:0]).dtype
        part = packed[begin : begin + array.nbytes].view(dtype)
        found.append(part.view(array.shape))
        begin += _padded(array)
    return found


def _padded(array: Array) -> int:
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT


def to_device(array: Array, device: torch.device) -> torch.Tensor:
    """Copies one array, in the order of the current stream; on a CPU returns the array itself."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    # A copy from pageable memory would wait for all earlier work of the stream.
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copies to pinned memory in the order of the current stream; on a CPU returns the tensor
    itself."""
    if tensor.device.type == "cpu":
        return tensor
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copied.copy_(tensor, non_blocking=True)


def all_to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies tensors as `to_host` does; in one copy if together they fill one storage."""
    whole = shared_storage(tensors)
    if tensors[0].device.type == "cpu" or whole is None:
        return [to_host(one) for one in tensors]
    return storage_views(to_host(whole), tensors)


def shared_storage(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The bytes of the storage that the tensors fill together; None if they do not fill one."""
    storage = tensors[0].untyped_storage()
    size = sum(one.nbytes for one in tensors)
    if size != storage.nbytes() or not all(_dense_in(storage, one) for one in tensors):
        return None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storage_views(whole: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of `whole`, a copy of the tensors' common memory, with the tensors' layout."""
    found: list[torch.Tensor] = []
    for one in tensors:
        begin = one.storage_offset() * one.element_size()
        found.append(whole[begin : begin + one.nbytes].view(one.dtype).view(one.shape))
    return found


def _dense_in(storage: torch.UntypedStorage, tensor: torch.Tensor) -> bool:
    inside = tensor.untyped_storage().data_ptr() == storage.data_ptr()
    return inside and tensor.is_contiguous()
