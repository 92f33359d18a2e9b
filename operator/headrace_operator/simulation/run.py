"""One policy over one trace in virtual time: arrivals, admission, engines, scaling."""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace_common.protocol.base import QueueLimits

from ..scaling import EngineSignals, LowPrioritySignals, QueueSignals, ScalingObservation
from .batch_lines import BatchLines
from .engine import SimulatedEngine
from .engine_profile import EngineProfile
from .events import NEVER, EventQueue
from .fleet import Fleet
from .result import Objectives, Sample, SimulationResult, Timings, quantiles
from .scalers import SimulatedScaler
from .workload import Trace

RATE_WINDOW = 5.0
"""Seconds over which rates are measured, as by the operator from two readings of pods' pages."""
SAMPLE_EVERY = 60.0
SHARE = 16
"""Low priority gets at least one of this many requests that engines take, as in the queue."""
LINE_DEADLINE = 3600.0
"""The deadline of a batch's request in the queue: the longest one, by the gateways' default."""
# Events at the same time run in this order.
_ENGINE, _ARRIVAL, _READY, _SCALING = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all policies of a comparison have in common. `replicas` engines serve at the start.

    Batches have `window` seconds. Engines take their requests while at most `low_priority_share`
    of their sequences run.
    """

    trace: Trace
    profile: EngineProfile
    objectives: Objectives
    limits: QueueLimits
    deadline: float = 600.0
    window: float = 86_400.0
    low_priority_share: float = 1.0
    replicas: int = 1


def simulate(setup: Setup, scaler: SimulatedScaler) -> SimulationResult:
    """Runs until every request has ended; costs are counted until the last arrival, or the end of
    the last batch."""
    return _Run(setup, scaler).result()


class _Counters(NamedTuple):
    """Running totals, or what was counted within `seconds`."""

    seconds: float
    admitted: float
    low_admitted: float
    begun: float
    ended: float
    prompt_tokens: float
    output_tokens: float
    prefill_seconds: float

    def since(self, before: "_Counters") -> "_Counters":
        return _Counters(*(new - old for new, old in zip(self, before, strict=True)))

    def rate(self, count: float) -> float | None:
        return count / self.seconds if self.seconds else None


class _Run:
    def __init__(self, setup: Setup, scaler: SimulatedScaler) -> None:
        self._setup = setup
        self._scaler = scaler
        self._fleet = Fleet(setup.profile)
        self._arrivals: list[float] = setup.trace.arrivals.tolist()
        self._prompts: list[int] = setup.trace.prompts.tolist()
        self._outputs: list[int] = setup.trace.outputs.tolist()
        self._first = np.full(len(self._arrivals), np.nan)
        self._ends = np.full(len(self._arrivals), np.nan)
        self._batches = BatchLines(setup.trace, setup.window)
        self._waiting: deque[int] = deque()
        self._low: deque[int] = deque()
        """Waiting requests of batches."""
        self._queued_at: dict[int, float] = {}
        """When each of them was put on the queue."""
        self._given = self._low_admitted = self._low_running = 0
        self._waiting_tokens = 0
        self._events = EventQueue()
        self._scheduled: dict[int, int] = {}
        """The next event of each engine that has one."""
        self._admitted = self._refused = self._expired = self._ended = 0
        self._prompt_tokens = 0
        self._started: dict[int, float] = {}
        """When each request started that has no token yet."""
        self._begun = 0
        self._prefill_seconds = 0.0
        self._counters: deque[_Counters] = deque()
        self._ups = self._downs = self._most = 0
        self._samples: list[Sample] = []
        self._sampled = 0
        """Requests admitted until the last sample."""

    def result(self) -> SimulationResult:
        self._fleet.start_serving(self._setup.replicas, 0.0)
        self._most = self._setup.replicas
        self._loop()
        trace = self._setup.trace
        until = max(trace.seconds, self._batches.last_end)
        waited = slice(None) if trace.batches is None else trace.batches < 0
        timings = Timings(
            trace.arrivals[waited], trace.outputs[waited], self._first[waited], self._ends[waited]
        )
        return SimulationResult(
            name=self._scaler.name,
            requests=len(self._arrivals),
            refused=self._refused,
            expired=self._expired,
            attainment=timings.attainment(self._setup.objectives),
            time_to_first_token=quantiles(timings.to_first_token()),
            time_per_output_token=quantiles(timings.per_token()),
            gpu_hours=self._fleet.engine_seconds(until) / 3600 * self._setup.profile.gpus,
            scale_ups=self._ups,
            scale_downs=self._downs,
            most_engines=self._most,
            longest_batch=self._batches.longest(),
            samples=tuple(self._samples),
        )

    def _loop(self) -> None:
        self._await_arrival(0)
        self._events.at(0.0, self._scale, rank=_SCALING)
        while self._refused + self._expired + self._ended < len(self._arrivals):
            self._events.run_next()

    def _await_arrival(self, request: int) -> None:
        if request < len(self._arrivals):
            self._events.at(self._arrivals[request], self._arrive, request, rank=_ARRIVAL)

    def _arrive(self, request: int) -> None:
        self._await_arrival(request + 1)
        if self._batches.has(request):
            self._batches.arrive(request, self._events.now)
        elif self._is_full(request):
            self._refused += 1
            return
        else:
            self._enqueue(request, self._waiting)
        self._dispatch()

    def _is_full(self, request: int) -> bool:
        tokens = self._prompts[request] + self._outputs[request]
        waiting = len(self._waiting) + len(self._low)
        return self._setup.limits.refuse(waiting, self._waiting_tokens, tokens)

    def _enqueue(self, request: int, waiting: deque[int]) -> None:
        self._admitted += 1
        waiting.append(request)
        self._waiting_tokens += self._prompts[request] + self._outputs[request]

    def _enqueue_batches(self) -> None:
        """Puts as many requests of batches on the queue as gateways would."""
        now = self._events.now
        self._expired += self._batches.drop_late(now)
        while (request := self._batches.next()) is not None and not self._is_full(request):
            self._batches.queue(request)
            self._enqueue(request, self._low)
            self._low_admitted += 1
            self._queued_at[request] = now

    def _next_waiting(self) -> deque[int]:
        """The requests of which the oldest is next."""
        turn = self._given % SHARE == SHARE - 1
        return self._low if self._low and (turn or not self._waiting) else self._waiting

    def _dispatch(self) -> None:
        """Gives waiting requests, oldest first, to engines with room; drops those past their
        deadline."""
        now = self._events.now
        self._enqueue_batches()
        while waiting := self._next_waiting():
            request = waiting[0]
            prompt, output = self._prompts[request], self._outputs[request]
            in_batch = waiting is self._low
            time = self._setup.window if in_batch else self._setup.deadline
            late = now - self._arrivals[request] > time
            in_queue = len(self._waiting) + len(self._low)
            if late:
                engine = None
            elif in_batch:
                engine = self._fleet.place_low(prompt, output, self._setup.low_priority_share)
            else:
                engine = self._fleet.place(in_queue, prompt, output)
            if not late and engine is None:
                if in_batch and self._waiting:
                    self._given += 1
                    continue
                return
            waiting.popleft()
            self._waiting_tokens -= prompt + output
            if in_batch:
                del self._queued_at[request]
            if engine is None:
                self._expired += 1
                if in_batch:
                    self._batches.end(request, now)
                continue
            self._given += 1
            self._low_running += in_batch
            engine.start(request, prompt, output, now)
            self._started[request] = now
            self._fleet.note_load(engine)
            self._schedule(engine)

    def _schedule(self, engine: SimulatedEngine) -> None:
        """Replaces the engine's next event."""
        if engine.number in self._scheduled:
            self._events.cancel(self._scheduled.pop(engine.number))
        at = engine.next_event()
        if at < NEVER:
            event = self._events.at(at, self._collect, engine, rank=_ENGINE)
            self._scheduled[engine.number] = event

    def _collect(self, engine: SimulatedEngine) -> None:
        now = self._events.now
        del self._scheduled[engine.number]
        begun, ended = engine.collect(now)
        for request in begun:
            self._first[request] = now
            self._prompt_tokens += self._prompts[request]
            self._prefill_seconds += now - self._started.pop(request)
        for request in ended:
            self._ends[request] = now
            if self._batches.has(request):
                self._low_running -= 1
                self._batches.end(request, now)
        self._begun += len(begun)
        self._ended += len(ended)
        self._schedule(engine)
        if ended:
            self._fleet.note_load(engine)
            self._fleet.retire_if_done(engine, now)
            self._dispatch()

    def _pod_ready(self, number: int) -> None:
        if self._fleet.ready(number, self._events.now):
            self._dispatch()

    def _scale(self) -> None:
        now = self._events.now
        self._events.at(now + self._scaler.interval, self._scale, rank=_SCALING)
        if self._waiting or self._low or self._batches.next() is not None:
            self._dispatch()  # drops requests that are too late even if no other event comes
        seen = self._observe(now)
        wanted = self._scaler.replicas(seen, now)
        change = wanted - self._fleet.desired
        if change > 0:
            self._ups += 1
            recalled = self._fleet.recall(change)
            for ready_at, number in self._fleet.create(change - recalled, now):
                self._events.at(ready_at, self._pod_ready, number, rank=_READY)
            if recalled:
                self._dispatch()
        elif change < 0:
            self._downs += 1
            self._fleet.remove(-change, now)
        self._most = max(self._most, wanted)
        if not self._samples or now - self._samples[-1].at >= SAMPLE_EVERY:
            self._samples.append(self._sample(seen, wanted, now))

    def _observe(self, now: float) -> ScalingObservation:
        """The observation that the operator would make from gateways' and engines' metrics."""
        fleet = self._fleet
        passed = self._passed(now)
        others_oldest = now - self._arrivals[self._waiting[0]] if self._waiting else 0.0
        low_oldest = now - self._queued_at[self._low[0]] if self._low else 0.0
        engines = EngineSignals(
            running=fleet.running,
            capacity=fleet.capacity(),
            kv_utilization=fleet.kv_utilization(),
            requests_per_second=passed.rate(passed.ended),
            tokens_per_second=passed.rate(passed.prompt_tokens + passed.output_tokens),
            output_tokens_per_second=passed.rate(passed.output_tokens),
            prefill_seconds=passed.prefill_seconds / passed.begun if passed.begun else None,
        )
        in_flight = sum(engine.running for engine in fleet.engines.values())
        return ScalingObservation(
            at=now,
            replicas=fleet.desired,
            ready=len(fleet.serving),
            queue=QueueSignals(
                waiting=len(self._waiting) + len(self._low),
                waiting_tokens=self._waiting_tokens,
                pending=in_flight,
                oldest_age=max(others_oldest, low_oldest),
                arrival_rate=passed.rate(passed.admitted),
                low_priority=LowPrioritySignals(
                    waiting=len(self._low),
                    pending=self._low_running,
                    arrival_rate=passed.rate(passed.low_admitted) or 0.0,
                    time_used=low_oldest / LINE_DEADLINE,
                    batches_behind=self._batches.behind(now),
                    others_oldest_age=others_oldest,
                ),
            ),
            engines=engines if fleet.serving else None,
        )

    def _passed(self, now: float) -> "_Counters":
        """What was counted recently."""
        counters = self._counters
        newest = _Counters(
            seconds=now,
            admitted=self._admitted,
            low_admitted=self._low_admitted,
            begun=self._begun,
            ended=self._ended,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._fleet.tokens_out,
            prefill_seconds=self._prefill_seconds,
        )
        counters.append(newest)
        while len(counters) > 2 and now - counters[1].seconds >= RATE_WINDOW:
            counters.popleft()
        return newest.since(counters[0])

    def _sample(self, seen: ScalingObservation, wanted: int, now: float) -> Sample:
        assert seen.queue is not None, "a simulated queue is always seen"
        previous = self._samples[-1].at if self._samples else 0.0
        rate = (self._admitted - self._sampled) / (now - previous) if now > previous else 0.0
        self._sampled = self._admitted
        return Sample(
            at=now,
            desired=wanted,
            ready=seen.ready,
            waiting=seen.queue.waiting,
            running=seen.queue.pending,
            arrival_rate=rate,
        )
