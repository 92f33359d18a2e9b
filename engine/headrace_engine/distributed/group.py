"""The collectives of the ranks: NCCL on GPUs, gloo on CPUs.

The process group is separate from torch's default group, so that several engines, or an application
that uses torch.distributed itself, may share a process. Without other nodes gloo listens on the
loopback interface only.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..core.errors import RankFailed

# Seconds that a rank waits for another one. The serving process notices a hanging step much sooner.
TIMEOUT = timedelta(minutes=10)
# The same while they connect: all of them have loaded then.
CONNECT_TIMEOUT = timedelta(minutes=1)
LOOPBACK = "127.0.0.1"

# Compiled classes with incomplete stubs.
_C10D: Any = dist


def open_store(meeting: Path | Connection, size: int) -> Any:
    """torch's store of `size` ranks, for `Group.connect`: a file of node 0, or on another node a
    connection to node 0. Raises RankFailed."""
    if not dist.is_available():
        raise RankFailed("this build of torch has no torch.distributed: use tensor_parallel_size 1")
    if isinstance(meeting, Path):
        return _C10D.FileStore(str(meeting), size)
    from .remote_store import RemoteStore

    return RemoteStore(meeting)


def interface_of(address: str) -> str:
    """The network interface that has this address. Raises RankFailed."""
    import psutil

    for name, found in psutil.net_if_addrs().items():
        if any(one.address == address for one in found):
            return name
    raise RankFailed(f"no network interface of this node has the address {address}")


class Work(Protocol):
    def wait(self) -> object:
        """Waits until the work is done; on GPUs the stream waits, not the process."""


class Backend(Protocol):
    """The methods of torch's process groups that are used here."""

    def allreduce(self, tensors: Sequence[torch.Tensor]) -> Work: ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work: ...

    def gather(self, parts: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Work: ...


class Group:
    """One rank's end of the process group. All ranks connect at once, before the first step.

    `device` is a device type: cpu or cuda.
    """

    def __init__(self, rank: int, size: int, device: str) -> None:
        self.rank, self.size, self._device = rank, size, device
        self._backend: Backend | None = None

    def connect(self, store: object, host: str | None = None) -> None:
        """Meets the other ranks through a store that all of them open (`open_store`). `host` is
        this node's address for other nodes, if there are any. Raises RankFailed."""
        try:
            make = self._nccl if self._device == "cuda" else self._gloo
            self._backend = make(store, host)
        except RuntimeError as error:
            raise RankFailed(f"rank {self.rank} cannot reach the others: {error}") from error

    def _nccl(self, store: object, host: str | None) -> Backend:
        if host is not None:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(host)}")
        options = _C10D.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        made: Backend = _C10D.ProcessGroupNCCL(store, self.rank, self.size, options)
        return made

    def _gloo(self, store: object, host: str | None) -> Backend:
        options = _C10D.ProcessGroupGloo._Options()
        options._timeout = CONNECT_TIMEOUT
        options._devices = [_C10D.ProcessGroupGloo.create_device(hostname=host or LOOPBACK)]
        made: Any = _C10D.ProcessGroupGloo(store, self.rank, self.size, options)
        made._set_default_timeout(TIMEOUT)
        connected: Backend = made
        return connected

    @property
    def file_done(self) -> bool:
        """Whether the file is no longer needed. NCCL reads it again later."""
        return self._device == "cpu" and self._backend is not None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        self._connected.allreduce([x]).wait()
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Copies rank 0's x into x of all other ranks; same shape, dense."""
        self._connected.broadcast(x, 0).wait()
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.contiguous()
        if self.rank:
            self._connected.gather([], x, 0).wait()
            return []
        parts = list(x.new_empty(self.size, *x.shape).unbind())
        self._connected.gather(parts, x, 0).wait()
        return parts

    def abort(self) -> None:
        """Releases threads that wait for a rank that is gone. The group cannot be used
        afterwards."""
        if self._device == "cuda" and self._backend is not None:
            aborted: Any = self._backend
            aborted.abort()

    @property
    def _connected(self) -> Backend:
        assert self._backend is not None, "the ranks must be connected before their first step"
        return self._backend
