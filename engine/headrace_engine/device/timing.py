"""Measures how long a device works on something, without waiting for the device."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

Clock = Callable[[], float]


class Times(Protocol):
    """Measures the device time of what is launched between construction and `end`."""

    def end(self) -> None: ...

    def wait(self) -> None:
        """Waits until the device has finished the measured work."""

    def seconds(self) -> float:
        """The measured time; valid only after a wait for this work or for later work."""


class CudaTimes:
    """Measures with CUDA events, so earlier work on the same stream does not count."""

    def __init__(self) -> None:
        make_event: Any = torch.cuda.Event  # has no annotations
        self._begun, self._ended = make_event(enable_timing=True), make_event(enable_timing=True)
        self._begun.record()

    def end(self) -> None:
        self._ended.record()

    def wait(self) -> None:
        self._ended.synchronize()

    def seconds(self) -> float:
        return float(self._begun.elapsed_time(self._ended)) / 1000.0


class HostTimes:
    """Measures a device that has finished its work when the launch returns."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun = self._ended = clock()

    def end(self) -> None:
        self._ended = self._clock()

    def wait(self) -> None:
        """Returns at once: the work is finished."""

    def seconds(self) -> float:
        return self._ended - self._begun


def begin_times(device: torch.device, clock: Clock) -> Times:
    """Starts a measurement; `clock` returns seconds, for devices without timers."""
    return CudaTimes() if device.type == "cuda" else HostTimes(clock)
