"""Gives the memory of tensors back for some time, without replacing the tensors.

What refers to a tensor, or to a part of it, has the same tensor afterwards.
"""

import ctypes
import gc
import mmap
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType

import torch


class ReleasedMemory:
    """The memory of tensors on one device, which is given back until `restore`.

    The contents of `kept` are the same afterwards, those of `lost` are zeros where they were given
    back. On a GPU the contents of `kept` are copied to host memory meanwhile, and addresses change.
    On a CPU `kept` stays as it is, since that is host memory, and the whole pages of `lost` are
    given back to the operating system.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        kept: Iterable[torch.Tensor] = (),
        lost: Iterable[torch.Tensor] = (),
    ) -> None:
        self._lost: list[tuple[torch.UntypedStorage, int]] = []
        self._kept: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        if device.type == "cpu":
            for storage in _storages(lost, device):
                return_pages(storage)
            return
        torch.cuda.synchronize(device)
        for storage in _storages(lost, device):
            self._lost.append((storage, storage.nbytes()))
            storage.resize_(0)
        for storage in _storages(kept, device):
            self._kept.append((storage, _bytes(storage).cpu()))
            storage.resize_(0)
        torch.cuda.empty_cache()

    def restore(self) -> None:
        """Takes the memory again. On a GPU this raises torch.OutOfMemoryError if it is used."""
        for storage, size in self._lost:
            storage.resize_(size)
            _bytes(storage).zero_()
        for storage, content in self._kept:
            storage.resize_(len(content))
            _bytes(storage).copy_(content)
        self._lost.clear()
        self._kept.clear()


def tensors_of(*roots: object) -> Iterator[torch.Tensor]:
    """Every tensor that objects lead to, through any attributes, containers and closures.

    Classes, modules and the globals of functions are left out.
    """
    seen = {id(root) for root in roots}
    found = list(roots)
    while found:
        each = found.pop()
        if isinstance(each, torch.Tensor):
            yield each
        for following in _referents(each):
            if id(following) not in seen:
                seen.add(id(following))
                found.append(following)


def _referents(found: object) -> Iterable[object]:
    if isinstance(found, type | ModuleType):
        return ()
    if isinstance(found, FunctionType):
        return found.__closure__ or (), found.__defaults__ or ()
    return gc.get_referents(found)


def return_pages(storage: torch.UntypedStorage) -> None:
    """Gives the whole pages of a storage in host memory back; they then read as zeros.

    Does nothing except on Linux.
    """
    if sys.platform != "linux":
        return
    size = mmap.PAGESIZE
    begin = -(-storage.data_ptr() // size) * size
    end = (storage.data_ptr() + storage.nbytes()) // size * size
    if end > begin:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED
        )


def collect() -> None:
    """Frees unreachable objects, also those that were exempt from collection, and gives free memory
    of the allocators back."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    torch.cuda.empty_cache()  # does nothing if no device is in use
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)


def _storages(
    tensors: Iterable[torch.Tensor], device: torch.device
) -> Iterator[torch.UntypedStorage]:
    """The memory of tensors on a device, each part once."""
    seen: set[int] = set()
    for tensor in tensors:
        if tensor.device.type != device.type:
            continue
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and storage.nbytes() and address not in seen:
            seen.add(address)
            yield storage


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
