"""Chooses among ways to compute the same by timing them where they will run, once, at warm-up.

The first candidate is what is used without measuring. Another one is chosen only if it is clearly
faster, its result is the first one's but for rounding, and the same bits each time: a race between
a kernel's programs would show here and not in answers.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

# Computes once with a candidate.
Run = Callable[[], torch.Tensor]
# Makes what all of some runs need, so that none of them waits for it.
Prepare = Callable[[Iterable[Run]], None]

# What another candidate must be below, as a share of the first one's time.
GAIN = 0.98
# Relative error against the first one's result; rounding of 16-bit floats gives a few thousandths.
TOLERANCE = 2e-2
REPEATS = 3
BUDGET = 20.0
NO_TIME = "no time was left"


class Timer(Protocol):
    def __call__(self, run: Run) -> float:
        """Seconds of the device for one `run`."""


class CudaTimer:
    """Replays of a recording: what the host takes for launches is not among it."""

    def __init__(self, rounds: int = 7) -> None:
        self._rounds = rounds

    def __call__(self, run: Run) -> float:
        graph, kept = self._record(run)
        seconds = statistics.median([self._replay(graph) for _ in range(self._rounds)])
        del kept  # only now: replays write it
        return seconds

    def _record(self, run: Run) -> tuple[Any, torch.Tensor]:
        """Without torch.cuda.graph, which gives all free memory back each time."""
        make_graph: Any = torch.cuda.CUDAGraph
        make_stream: Any = torch.cuda.Stream
        graph, stream = make_graph(), make_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            torch.cuda.synchronize()
            pool = torch.cuda.graph_pool_handle()
            graph.capture_begin(pool=pool)
            try:
                kept = run()
            finally:
                _end_capture(graph, pool)  # or the stream could not be used again
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
    """Raises RuntimeError for a recording that was broken, and has the allocator forget it: torch
    2.11 would go on as if one were under way, and give no memory back any more."""
    try:
        graph.capture_end()
    except RuntimeError:
        internals: Any = torch._C
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # later ones have done so by themselves
            internals._cuda_endAllocateToPool(device, pool)
            internals._cuda_releasePool(device, pool)
        raise


@dataclass(frozen=True, slots=True)
class Choice:
    """`microseconds` of the candidates that were measured, each for `read_bytes` of weights or keys
    and values; `refused` says why others are out."""

    kernel: str
    chosen: str
    microseconds: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    read_bytes: int = 0

    @property
    def final(self) -> bool:
        """Whether it was measured, and nothing was left out for want of time."""
        return bool(self.microseconds) and NO_TIME not in self.refused.values()


class Autotuner:
    """`known` are choices by kernel that were measured before; `failures` are what a candidate may
    raise that does not work on the device. `prepare` gets a kernel's candidates together."""

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
        """Whether anything was, so that there is something new to keep."""
        return any(choice.microseconds for choice in self.choices)

    def choose(
        self,
        kernel: str,
        candidates: Mapping[str, Run],
        read_bytes: int = 0,
        *,
        tolerance: float = TOLERANCE,
    ) -> str:
        """The name of the candidate to use for what `kernel` names. None may differ from the first
        one's result by more than `tolerance`, in norm; with 0 all must give its bits, when they are
        replayed too."""
        choice = replace(self._choice(kernel, candidates, tolerance), read_bytes=read_bytes)
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

    def _choice(self, kernel: str, candidates: Mapping[str, Run], tolerance: float) -> Choice:
        first = next(iter(candidates))
        if (known := self._known.get(kernel)) in candidates:
            assert known is not None
            return Choice(kernel, known)
        if len(candidates) == 1:
            return Choice(kernel, first)
        seconds, refused = self._measure(kernel, candidates, tolerance)
        fastest = min(seconds, key=lambda name: seconds[name], default=first)
        if first in seconds and seconds[fastest] > GAIN * seconds[first]:
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
            # A kernel that never ends is the last one here.
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
        """Seconds, and what is wrong with the timer's last run if it was to give these bits."""
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
