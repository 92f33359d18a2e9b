"""Chooses among candidates that compute the same, by timing them once, at warm-up, on the device.

The first candidate is the default, used without measuring. Another one is chosen only if it is
clearly faster, its result equals the first one's except for rounding, and repeated runs give the
same bits. So a race between a kernel's programs is found here and not in answers.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from ..cuda_graphs.capture import no_collection

logger = logging.getLogger(__name__)

# Computes with a candidate, once.
Run = Callable[[], torch.Tensor]
# Compiles what some candidates need, so that no measurement waits for it.
Prepare = Callable[[Iterable[Run]], None]

# Another candidate must take less than this share of the first one's time. Whole steps take
# milliseconds, and their times vary less.
GAIN, STEP_GAIN = 0.98, 0.995
# Relative error against the first one's result; rounding of 16-bit floats causes a few thousandths.
TOLERANCE = 2e-2
REPEATS = 3
BUDGET = 20.0
NO_TIME = "no time was left"


class Timer(Protocol):
    def __call__(self, run: Run) -> float:
        """Device time of one `run`, in seconds."""


class CudaTimer:
    """Times replays of a CUDA graph, which exclude the host's time for launches."""

    def __init__(self, rounds: int = 7) -> None:
        self._rounds = rounds

    def __call__(self, run: Run) -> float:
        graph, kept = self._record(run)
        seconds = statistics.median([self._replay(graph) for _ in range(self._rounds)])
        del kept  # not earlier: replays write to it
        return seconds

    def _record(self, run: Run) -> tuple[Any, torch.Tensor]:
        """Captures without torch.cuda.graph, which frees all cached memory each time."""
        make_graph: Any = torch.cuda.CUDAGraph
        make_stream: Any = torch.cuda.Stream
        graph, stream = make_graph(), make_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            torch.cuda.synchronize()
            pool = torch.cuda.graph_pool_handle()
            with no_collection():
                graph.capture_begin(pool=pool)
                try:
                    kept = run()
                finally:
                    _end_capture(graph, pool)  # otherwise the stream could not be used again
        torch.cuda.current_stream().wait_stream(stream)
        return graph, kept

    def _replay(self, graph: Any) -> float:
        make: Any = torch.cuda.Event
        begin, end = make(enable_timing=True), make(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000.0


def _end_capture(graph: Any, pool: Any) -> None:
    """Ends a broken capture and makes the allocator forget it. Otherwise torch 2.11 would behave as
    if it were still capturing, and never free memory again. Raises RuntimeError."""
    try:
        graph.capture_end()
    except RuntimeError:
        internals: Any = torch._C
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # later torch versions have already done so
            internals._cuda_endAllocateToPool(device, pool)
            internals._cuda_releasePool(device, pool)
        raise


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice. `microseconds` has the measured candidates, each reading `read_bytes` of weights
    or KV; `refused` says why others were excluded."""

    kernel: str
    chosen: str
    microseconds: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    read_bytes: int = 0

    @property
    def final(self) -> bool:
        """Whether it was measured, with no candidate excluded for lack of time."""
        return bool(self.microseconds) and NO_TIME not in self.refused.values()


class Autotuner:
    """Measures candidates. `known` are earlier choices by kernel; `failures` are the exceptions
    of a candidate that does not work on the device. `prepare` gets all candidates of a kernel at
    once."""

    def __init__(
        self,
        timer: Timer,
        *,
        known: Mapping[str, str] | None = None,
        failures: tuple[type[Exception], ...] = (RuntimeError,),
        budget: float = BUDGET,
        clock: Callable[[], float] = time.monotonic,
        prepare: Prepare | None = None,
    ) -> None:
        self._timer, self._known, self._failures = timer, known or {}, failures
        self._clock, self._deadline, self._prepare = clock, clock() + budget, prepare
        self.choices: list[Choice] = []

    @property
    def measured(self) -> bool:
        """Whether anything was measured, so that there are new choices to store."""
        return any(choice.microseconds for choice in self.choices)

    def choose(
        self,
        kernel: str,
        candidates: Mapping[str, Run],
        read_bytes: int = 0,
        *,
        tolerance: float = TOLERANCE,
        gain: float = GAIN,
    ) -> str:
        """Returns the name of the candidate to use for `kernel`. No result may differ from the
        first one's by more than `tolerance`, in norm; with 0 all must have the same bits, also when
        replayed. Another candidate than the first must take less than `gain` of its time."""
        choice = replace(self._choice(kernel, candidates, tolerance, gain), read_bytes=read_bytes)
        self.choices.append(choice)
        logger.info(
            "kernel tuned",
            extra={
                "kernel": kernel,
                "chosen": choice.chosen,
                "microseconds": dict(choice.microseconds),
                "refused": dict(choice.refused),
            },
        )
        return choice.chosen

    def _choice(
        self, kernel: str, candidates: Mapping[str, Run], tolerance: float, gain: float
    ) -> Choice:
        first = next(iter(candidates))
        if (known := self._known.get(kernel)) in candidates:
            assert known is not None
            return Choice(kernel, known)
        if len(candidates) == 1:
            return Choice(kernel, first)
        seconds, refused = self._measure(kernel, candidates, tolerance)
        fastest = min(seconds, key=lambda name: seconds[name], default=first)
        if first in seconds and seconds[fastest] > gain * seconds[first]:
            fastest = first
        micros = {name: round(one * 1e6, 2) for name, one in seconds.items()}
        return Choice(kernel, fastest, micros, refused)

    def _measure(
        self, kernel: str, candidates: Mapping[str, Run], tolerance: float
    ) -> tuple[dict[str, float], dict[str, str]]:
        seconds: dict[str, float] = {}
        refused: dict[str, str] = {}
        expected: torch.Tensor | None = None
        if self._prepare is not None and self._clock() < self._deadline:
            self._prepare(candidates.values())
        for name, run in candidates.items():
            if self._clock() >= self._deadline:
                refused[name] = NO_TIME
                continue
            # If a kernel hangs, this is its last log line.
            logger.debug("kernel runs", extra={"kernel": kernel, "candidate": name})
            taken, problem = 0.0, None
            try:
                found = run().clone()
                expected = found if expected is None else expected
                if found is not expected:
                    problem = _problem(run, found, expected, tolerance)
                if problem is None:
                    taken, problem = self._time(run, None if tolerance else expected)
            except self._failures as error:
                problem = f"{type(error).__name__}: {error}"[:200]
            if problem is None:
                seconds[name] = taken
            else:
                refused[name] = problem
        return seconds, refused

    def _time(self, run: Run, expected: torch.Tensor | None) -> tuple[float, str | None]:
        """Measures the seconds.

        If `expected` is given, compares it with the last result of the timer.
        """
        if expected is None:
            return self._timer(run), None
        given = [expected]

        def kept() -> torch.Tensor:
            given[:] = [run()]
            return given[0]

        taken = self._timer(kept)
        same = torch.equal(given[0], expected)
        return taken, None if same else "its result differs when it is replayed"


def _problem(run: Run, found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str | None:
    if not tolerance and not torch.equal(found, expected):
        return "its result has other bits"
    if tolerance and not (error := _error(found, expected)) <= tolerance:
        return f"its result is {error:.2g} off"
    same = all(torch.equal(run(), found) for _ in range(REPEATS))
    return None if same else "its result differs from run to run"


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())
