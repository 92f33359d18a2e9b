"""Simulates engines of several models that take turns on one accelerator, in virtual time.

One of the engines is awake at a time. The rule of turns is the product's own `next_holder`, applied
as often as engines do. An engine that falls asleep has some seconds for its running requests and
gives the rest back to the queue. They continue with their next token, after their tokens so far
were computed again.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace_common.protocol.base import QueueLimits
from headrace_common.protocol.turns import Demand, Member, Turn, TurnBounds, next_holder

from .engine import EngineCosts, SimulatedEngine
from .engine_profile import EngineProfile
from .events import NEVER, EventQueue
from .result import Objectives, Timings, quantiles
from .workload import Trace

LOOK_EVERY = 0.25
"""Seconds between two looks at the slot, as in the engine."""
_NORMAL_PRIORITY = 1
# Events at the same time run in this order.
_ENGINE, _ARRIVAL, _SLOT = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSetup:
    """The models' traces, and the bounds of their turns.

    Running requests have `timeout` seconds to end before an engine sleeps.
    """

    traces: Sequence[Trace]
    profile: EngineProfile
    objectives: Objectives
    limits: QueueLimits
    bounds: TurnBounds = TurnBounds()
    timeout: float = 10.0
    deadline: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedResult:
    """The share of requests that met the objectives, by model and of all; seconds to the first
    token; requests that were lost, which count as missed; GPU-hours; how often an engine woke."""

    attainment: float
    by_model: tuple[float, ...]
    time_to_first_token: dict[str, float]
    lost: int
    gpu_hours: float
    wake_ups: int


def simulate_shared(setup: SharedSetup) -> SharedResult:
    """Runs until every request has ended. The accelerator costs until the last arrival."""
    return _Run(setup).result()


@dataclass(slots=True)
class _Request:
    """A request that waits. `prompt` includes the tokens that it has already got."""

    number: int
    arrival: float
    prompt: int
    output: int


class _Model:
    """One model: its trace, its queue, and the times of its requests."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.arrivals: list[float] = trace.arrivals.tolist()
        self.prompts: list[int] = trace.prompts.tolist()
        self.outputs: list[int] = trace.outputs.tolist()
        self.waiting: deque[_Request] = deque()
        self.tokens = 0
        self.lost = self.ended = 0
        self.first = np.full(len(trace), np.nan)
        self.ends = np.full(len(trace), np.nan)

    @property
    def done(self) -> bool:
        return self.lost + self.ended == len(self.arrivals)

    def queue(self, request: _Request, *, first: bool = False) -> None:
        (self.waiting.appendleft if first else self.waiting.append)(request)
        self.tokens += request.prompt + request.output

    def take(self) -> _Request:
        request = self.waiting.popleft()
        self.tokens -= request.prompt + request.output
        return request

    def drop_late(self, now: float, deadline: float) -> None:
        """Requests that were given back have started, and are not dropped."""
        while (
            self.waiting
            and now - self.waiting[0].arrival > deadline
            and np.isnan(self.first[self.waiting[0].number])
        ):
            self.take()
            self.lost += 1

    def timings(self) -> Timings:
        return Timings(self.trace.arrivals, self.trace.outputs, self.first, self.ends)


@dataclass(slots=True)
class _Slot:
    """The accelerator. `engine` computes while its model is awake; `leaving`: it takes no new work,
    and sleeps as soon as nothing runs."""

    turn: Turn = Turn()
    ended: dict[int, float] = field(default_factory=dict)
    """When each model's last turn ended."""
    engine: SimulatedEngine | None = None
    given: dict[int, _Request] = field(default_factory=dict)
    """The requests that run, by number."""
    leaving: bool = False
    event: int | None = None
    look: int | None = None

    @property
    def model(self) -> int | None:
        return None if self.turn.holder is None else int(self.turn.holder)

    @property
    def running(self) -> int:
        return 0 if self.engine is None else self.engine.running


class _Run:
    def __init__(self, setup: SharedSetup) -> None:
        self._setup = setup
        self._models = [_Model(trace) for trace in setup.traces]
        self._slot = _Slot()
        self._costs = EngineCosts(setup.profile)
        self._events = EventQueue()
        self._wake_ups = 0

    def result(self) -> SharedResult:
        for model in range(len(self._models)):
            self._await_arrival(model, 0)
        while not all(model.done for model in self._models):
            self._events.run_next()
        objectives = self._setup.objectives
        by_model = tuple(model.timings().attainment(objectives) for model in self._models)
        counts = [len(model.trace) for model in self._models]
        seconds = max(model.trace.seconds for model in self._models)
        return SharedResult(
            attainment=float(np.average(by_model, weights=counts)),
            by_model=by_model,
            time_to_first_token=quantiles(
                np.concatenate([model.timings().to_first_token() for model in self._models])
            ),
            lost=sum(model.lost for model in self._models),
            gpu_hours=seconds / 3600 * self._setup.profile.gpus,
            wake_ups=self._wake_ups,
        )

    def _await_arrival(self, model: int, number: int) -> None:
        arrivals = self._models[model].arrivals
        if number < len(arrivals):
            self._events.at(arrivals[number], self._arrive, model, number, rank=_ARRIVAL)

    def _arrive(self, number: int, request: int) -> None:
        model = self._models[number]
        self._await_arrival(number, request + 1)
        prompt, output = model.prompts[request], model.outputs[request]
        if self._setup.limits.refuse(len(model.waiting), model.tokens, prompt + output):
            model.lost += 1
            return
        model.queue(_Request(request, self._events.now, prompt, output))
        self._dispatch(number)

    def _dispatch(self, number: int) -> None:
        """Gives the model's waiting requests to its engine, oldest first, if it takes work."""
        model, slot, now = self._models[number], self._slot, self._events.now
        model.drop_late(now, self._setup.deadline)
        if slot.model == number and slot.engine is not None and not slot.leaving:
            while model.waiting:
                request = model.waiting[0]
                if not slot.engine.has_room(request.prompt, request.output):
                    break
                model.take()
                slot.given[request.number] = request
                slot.engine.start(request.number, request.prompt, request.output, now)
            self._schedule()
        if model.waiting:
            self._look_soon()

    def _schedule(self) -> None:
        """Replaces the next event of the engine that is awake."""
        slot = self._slot
        if slot.event is not None:
            self._events.cancel(slot.event)
            slot.event = None
        at = NEVER if slot.engine is None else slot.engine.next_event()
        if at < NEVER:
            slot.event = self._events.at(at, self._collect, rank=_ENGINE)

    def _collect(self) -> None:
        slot = self._slot
        assert slot.engine is not None and slot.model is not None, "only an awake engine computes"
        slot.event = None
        now, number = self._events.now, slot.model
        model = self._models[number]
        begun, ended = slot.engine.collect(now)
        for request in begun:
            if np.isnan(model.first[request]):
                model.first[request] = now
        for request in ended:
            model.ends[request] = now
            del slot.given[request]
        model.ended += len(ended)
        self._schedule()
        if slot.leaving and not slot.running:
            self._fall_asleep()
        elif ended:
            self._dispatch(number)

    def _look_soon(self) -> None:
        if self._slot.look is None:
            at = (self._events.now // LOOK_EVERY + 1) * LOOK_EVERY
            self._slot.look = self._events.at(at, self._look, rank=_SLOT)

    def _look(self) -> None:
        """Applies the rule of turns, again and again while any request waits."""
        slot = self._slot
        slot.look = None
        now = self._events.now
        for model in self._models:
            model.drop_late(now, self._setup.deadline)
        if any(model.waiting for model in self._models):
            self._look_soon()
        if slot.leaving:
            return
        wanted = next_holder(self._members(), slot.turn, self._setup.bounds, now)
        if wanted is None or wanted == slot.turn.holder:
            return
        if slot.turn.holder is None:
            slot.turn = Turn(wanted, now, slot.turn.last)
            self._wake_ups += 1
            awake = now + self._setup.profile.switch_seconds
            self._events.at(awake, self._wake, rank=_SLOT)
        elif slot.engine is not None:
            self._leave()

    def _members(self) -> list[Member]:
        slot = self._slot
        return [
            Member(
                str(number),
                self._demand(model),
                slot.running if number == slot.model else 0,
                slot.ended.get(number, 0.0),
            )
            for number, model in enumerate(self._models)
        ]

    def _demand(self, model: _Model) -> Demand | None:
        if not model.waiting:
            return None
        since = model.waiting[0].arrival
        return Demand(_NORMAL_PRIORITY, since, since + self._setup.deadline)

    def _wake(self) -> None:
        slot = self._slot
        assert slot.model is not None, "the slot was taken before the engine wakes"
        now = self._events.now
        slot.engine = SimulatedEngine(slot.model, self._costs, now, now)
        self._dispatch(slot.model)

    def _leave(self) -> None:
        slot = self._slot
        slot.leaving = True
        if slot.running:
            until = self._events.now + self._setup.timeout
            self._events.at(until, self._give_up, slot.turn, rank=_SLOT)
        else:
            self._fall_asleep()

    def _give_up(self, turn: Turn) -> None:
        """The end of the time for running requests, unless they have ended before."""
        if self._slot.turn == turn:
            self._fall_asleep()

    def _fall_asleep(self) -> None:
        """Gives back what runs, and leaves the slot."""
        slot = self._slot
        assert slot.engine is not None and slot.model is not None, "only an awake engine sleeps"
        now, number = self._events.now, slot.model
        model = self._models[number]
        left = slot.engine.left(now)
        for request in sorted(slot.given.values(), key=lambda each: each.arrival, reverse=True):
            output = left.get(request.number, request.output)
            request.prompt += request.output - output
            request.output = output
            model.queue(request, first=True)
        slot.given.clear()
        slot.engine, slot.leaving = None, False
        self._schedule()
        slot.ended[number] = now
        slot.turn = Turn(None, now, slot.turn.holder)
        self._look_soon()
