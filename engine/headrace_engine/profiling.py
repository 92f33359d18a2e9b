"""A profile of the engine's next steps on demand, as a Chrome trace.

Asked for by any thread; torch's profiler itself is touched by the engine's thread alone.
"""

import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .errors import EngineError

T = TypeVar("T")


class ProfileRefused(EngineError):
    """No profile can be made now; the message says why."""

    code = "profile_refused"


@dataclass(slots=True)
class _Order:
    steps: int
    trace: Future[bytes] = field(default_factory=Future)
    profiler: Any = None


class StepProfiler:
    """Nothing but a look at one attribute a step while no profile is wanted."""

    def __init__(self) -> None:
        self._order: _Order | None = None
        self._lock = threading.Lock()

    def record(self, steps: int, timeout: float) -> bytes:
        """The trace of the next `steps` steps, JSON for chrome://tracing or Perfetto; blocks.

        Raises ProfileRefused where another profile is being made, or not so many steps ran within
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
        """Runs one step of the engine, recorded if a profile is wanted."""
        order = self._order
        return step() if order is None else self._recorded(order, step)

    def _give_up(self, order: _Order) -> None:
        """Where recording has begun, the engine's thread ends it with its next step."""
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
