"""How long a device works on something, known when it is through: nobody waits for that here."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

Clock = Callable[[], float]


class Times(Protocol):
    """Of what is launched between the making and `end`."""

    def end(self) -> None: ...

    def wait(self) -> None:
        """Until the device is through with it."""

    def seconds(self) -> float:
        """Only after a wait for this, or for anything behind it."""


class CudaTimes:
    """It begins when the device is through with what was launched before, on the same stream."""

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
    """Of a device that is through with something when its launch returns."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun = self._ended = clock()

    def end(self) -> None:
        self._ended = self._clock()

    def wait(self) -> None:
        """Nothing to wait for."""

    def seconds(self) -> float:
        return self._ended - self._begun


def begin_times(device: torch.device, clock: Clock) -> Times:
    """`clock` counts seconds, for devices that keep no time themselves."""
    return CudaTimes() if device.type == "cuda" else HostTimes(clock)
