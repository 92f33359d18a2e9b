"""Engines of one fleet in virtual time, with prompts and answers on the same engines or apart.

The scheduler is the engine's own, and a step takes what the cost model says. A request goes to the
fitting engine with the least work. A producer hands it over after its first token: it generates
until the KV is written, and after `gap` seconds and the time to read the KV a consumer goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.request import EngineRequest
from headrace_engine.core.step_plan import SchedulerOutput, StepResult
from headrace_operator.simulation.engine import EngineCosts
from headrace_operator.simulation.engine_profile import EngineProfile
from headrace_operator.simulation.events import NEVER, EventQueue

from .batching import Continuous
from .jobs import Job
from .measures import Log
from .run import BLOCK_SIZE, LAST, OTHER, make_scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """How many engines there are, and how many of them are producers (0: all do everything).

    Consumers compute prompts of up to `local` tokens, and longer ones if all producers have work
    for `hold` seconds. A token's KV is written, and read, in `copy` of the seconds in which it is
    computed; a hand-over takes `gap` seconds besides.
    """

    engines: int
    producers: int = 0
    local: int = 0
    hold: float = 2.0
    copy: float = 0.02
    gap: float = 0.13
    itl_target: float = 0.1


class _Engine:
    """One engine. `left` are the prompt tokens that it has not computed yet."""

    def __init__(self, profile: EngineProfile, fleet: Fleet, events: EventQueue) -> None:
        self.scheduler = make_scheduler(
            profile, "fcfs", lambda: events.now, itl_target=fleet.itl_target
        )
        self.requests: dict[str, int] = {}  # with the tokens of their prompts that are left
        self.stepping = False

    @property
    def left(self) -> int:
        return sum(self.requests.values())


class VirtualFleet:
    """One run of a fleet with the engines of a profile."""

    def __init__(self, profile: EngineProfile, fleet: Fleet, jobs: Sequence[Job]) -> None:
        self._fleet, self._costs = fleet, EngineCosts(profile)
        self._jobs = {job.name: job for job in jobs}
        self._events = EventQueue()
        self._engines = [_Engine(profile, fleet, self._events) for _ in range(fleet.engines)]
        self._producers = self._engines[: fleet.producers]
        self._others = self._engines[fleet.producers :]
        self.log = Log(jobs)
        self.handed_over = 0
        for job in jobs:
            self._events.at(job.arrival, self._arrive, job)

    def run(self) -> Log:
        while self._events.next_time < NEVER:
            self._events.run_next()
        self.log.seconds = self._events.now
        return self.log

    def _arrive(self, job: Job) -> None:
        engines = self._others
        if self._producers and len(job.prompt) > self._fleet.local:
            left = min(engine.left for engine in self._producers)
            if left * self._costs.prompt_token_seconds <= self._fleet.hold:
                engines = self._producers
        self._add(self._least_busy(engines), job, job.prompt)

    def _least_busy(self, engines: Sequence[_Engine]) -> _Engine:
        token, step = self._costs.prompt_token_seconds, self._costs.decode_seconds
        return min(engines, key=lambda each: each.left * token + step[1] * len(each.requests))

    def _add(self, engine: _Engine, job: Job, prompt: tuple[int, ...]) -> None:
        made = len(self.log.tokens.get(job.name, ()))
        request = EngineRequest(
            request_id=job.name,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=job.max_tokens - made),
            seed=0,
            arrival=self._events.now,
        )
        engine.scheduler.add(request)
        engine.requests[job.name] = len(prompt)
        self._step(engine)

    def _step(self, engine: _Engine) -> None:
        if engine.stepping:
            return
        scheduler_output = engine.scheduler.schedule()
        if scheduler_output is not None:
            engine.stepping = True
            seconds = Continuous().cost(scheduler_output, self._costs).seconds
            at = self._events.now + seconds
            self._events.at(at, self._end_step, engine, scheduler_output, seconds)

    def _end_step(self, engine: _Engine, scheduler_output: SchedulerOutput, seconds: float) -> None:
        for item in scheduler_output.scheduled:
            name = item.sequence.request.request_id
            if name in engine.requests:
                rest = item.sequence.prompt_length - item.start - item.length
                engine.requests[name] = max(0, rest)
        sampled = tuple(
            LAST if self._is_last(item.sequence.request.request_id) else OTHER
            for item in scheduler_output.scheduled
            if item.samples
        )
        result = StepResult(sampled, seconds=seconds)
        for output in engine.scheduler.update(scheduler_output, result):
            name = output.request_id
            first = name not in self.log.tokens
            self.log.token(name, self._events.now)
            if output.finish_reason is not None:
                del engine.requests[name]
                self.log.completed.add(name)
            elif first and engine in self._producers:
                self._events.at(self._events.now + self._copying(name), self._give, engine, name)
        engine.stepping = False
        self._step(engine)

    def _is_last(self, name: str) -> bool:
        return len(self.log.tokens.get(name, ())) + 1 >= self._jobs[name].output

    def _copying(self, name: str) -> float:
        """The seconds in which a request's KV is written, or read."""
        prompt = len(self._jobs[name].prompt)
        return prompt * self._costs.prompt_token_seconds * self._fleet.copy

    def _give(self, engine: _Engine, name: str) -> None:
        if name in engine.requests:
            engine.scheduler.abort(name)
            del engine.requests[name]
            self.handed_over += 1
            pause = self._fleet.gap + self._copying(name)
            self._events.at(self._events.now + pause, self._go_on, name)

    def _go_on(self, name: str) -> None:
        """A consumer computes what is left of the last block, and goes on."""
        job = self._jobs[name]
        known = len(job.prompt) + len(self.log.tokens[name])
        tail = (known - 1) % BLOCK_SIZE + 1
        self._add(self._least_busy(self._others), job, job.prompt[:tail])
