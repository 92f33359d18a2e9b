"""Records the engine's next steps on demand, as a Chrome trace.

Any thread may ask for a profile; only the engine's thread touches torch's profiler.
"""

import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..core.errors import EngineError

T = TypeVar("T")


class ProfileRefused(EngineError):
    """A profile cannot be recorded now; the message says why."""

    code = "profile_refused"


@dataclass(slots=True)
class _Order:
    steps: int
    trace: Future[bytes] = field(default_factory=Future)
    profiler: Any = None


class StepProfiler:
    """Records profiles of steps. While none is requested, it costs one attribute read per step."""

    def __init__(self) -> None:
        self._order: _Order | None = None
        self._lock = threading.Lock()

    def record(self, steps: int, timeout: float) -> bytes:
        """Waits for the next `steps` steps; returns their trace for chrome://tracing or Perfetto.

        Raises ProfileRefused if another profile is being recorded, or fewer steps ran within
        `timeout` seconds.
        """
        order = _Order(steps)
        with self._lock:
            if self._order is not None:
                raise ProfileRefused("another profile is being recorded: try again when it is done")
            self._order = order
        try:
            return order.trace.result(timeout)
        except FutureTimeout:
            self._give_up(order)
            raise ProfileRefused(
                f"the engine ran fewer than {steps} steps in {timeout:.0f} s: ask for fewer, or "
                "while it has work"
            ) from None

    def step(self, step: Callable[[], T]) -> T:
        """Runs one step of the engine, and records it if a profile is requested."""
        order = self._order
        return step() if order is None else self._recorded(order, step)

    def _give_up(self, order: _Order) -> None:
        """Cancels a request. If recording has begun, the next step ends it, in its own thread."""
        with self._lock:
            order.trace.cancel()
            if order.profiler is None and self._order is order:
                self._order = None

    def _recorded(self, order: _Order, step: Callable[[], T]) -> T:
        import torch

        with self._lock:
            given_up = order.trace.cancelled()
            if order.profiler is None and not given_up:
                order.profiler = torch.profiler.profile(with_stack=True)
                order.profiler.start()
        if given_up:
            self._end(order)
            return step()
        with torch.profiler.record_function("step"):
            result = step()
        order.steps -= 1
        if order.steps == 0:
            self._end(order)
        return result

    def _end(self, order: _Order) -> None:
        if order.profiler is not None:
            order.profiler.stop()
        if order.trace.set_running_or_notify_cancel():
            order.trace.set_result(_chrome_trace(order.profiler))
        with self._lock:
            if self._order is order:
                self._order = None


def _chrome_trace(profiler: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return file.read_bytes()
