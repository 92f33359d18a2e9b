"""The collectives of the ranks: NCCL where they compute on GPUs, gloo on CPUs.

A process group of its own, so that several engines, or an application that uses torch.distributed
itself, may share a process. Gloo listens on the loopback interface only.
"""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..errors import RankFailed

# A rank that waits so long for another one gives up. Who serves requests notices a step that hangs
# much sooner.
TIMEOUT = timedelta(minutes=10)
LOOPBACK = "127.0.0.1"

# Compiled classes, whose stubs lack what they have.
_C10D: Any = dist


class Work(Protocol):
    def wait(self) -> object:
        """Until it is done; on GPUs until what is queued behind it will find it done."""


class Backend(Protocol):
    """What is used of torch's process groups."""

    def allreduce(self, tensors: Sequence[torch.Tensor]) -> Work: ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work: ...

    def gather(self, parts: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Work: ...


class Group:
    """One rank's end. To be connected before the first step, by all ranks at once.

    `device` is a type of device: cpu or cuda.
    """

    def __init__(self, rank: int, size: int, device: str) -> None:
        self.rank, self.size, self._device = rank, size, device
        self._backend: Backend | None = None

    def connect(self, store: Path) -> None:
        """Meets the other ranks through a file that all of them name. Raises RankFailed."""
        if not dist.is_available():
            raise RankFailed("this build of torch has no torch.distributed")
        try:
            make = self._nccl if self._device == "cuda" else self._gloo
            self._backend = make(_C10D.FileStore(str(store), self.size))
        except RuntimeError as error:
            raise RankFailed(f"rank {self.rank} cannot reach the others: {error}") from error

    def _nccl(self, meeting: object) -> Backend:
        options = _C10D.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        made: Backend = _C10D.ProcessGroupNCCL(meeting, self.rank, self.size, options)
        return made

    def _gloo(self, meeting: object) -> Backend:
        options = _C10D.ProcessGroupGloo._Options()
        options._timeout = TIMEOUT
        options._devices = [_C10D.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        made: Backend = _C10D.ProcessGroupGloo(meeting, self.rank, self.size, options)
        return made

    @property
    def met(self) -> bool:
        """Whether the file is needed no more. NCCL looks there again later."""
        return self._device == "cpu" and self._backend is not None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        self._connected.allreduce([x]).wait()
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x, into all others' x of the same shape; dense."""
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
        """Frees who waits for a rank that is gone; there is nothing to be had from it after."""
        if self._device == "cuda" and self._backend is not None:
            aborted: Any = self._backend
            aborted.abort()

    @property
    def _connected(self) -> Backend:
        assert self._backend is not None, "the ranks must be connected before their first step"
        return self._backend
