"""The collectives of the ranks: NCCL on GPUs, gloo on CPUs.

The process group is separate from torch's default group, so that several engines, or an application
that uses torch.distributed itself, may share a process. Gloo listens on the loopback interface
only.
"""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..core.errors import RankFailed

# Seconds that a rank waits for another one. The serving process notices a hanging step much sooner.
TIMEOUT = timedelta(minutes=10)
LOOPBACK = "127.0.0.1"

# Compiled classes with incomplete stubs.
_C10D: Any = dist


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

    def connect(self, store: Path) -> None:
        """Meets the other ranks through a file that all of them name. Raises RankFailed."""
        if not dist.is_available():
            raise RankFailed(
                "this build of torch has no torch.distributed: use tensor_parallel_size 1"
            )
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
