"""Runs jobs in virtual time: they arrive, the scheduler decides, each step takes what the cost
model says."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from headrace_engine.core.config import EngineConfig
from headrace_engine.core.outputs import SampledToken, SequenceOutput
from headrace_engine.core.request import FinishReason
from headrace_engine.core.request import Sequence as EngineSequence
from headrace_engine.core.step_plan import SchedulerOutput, StepResult
from headrace_engine.scheduler.input_validation import Limits
from headrace_engine.scheduler.policies import make_policy
from headrace_engine.scheduler.scheduler import Scheduler
from headrace_operator.simulation.engine import EngineCosts
from headrace_operator.simulation.engine_profile import EngineProfile
from headrace_operator.simulation.events import NEVER, EventQueue

from .batching import Batching
from .jobs import EOS, TOKEN, VOCABULARY, Job
from .measures import INPUT_WEIGHT, OUTPUT_WEIGHT, Log

BLOCK_SIZE = 16
LAST, OTHER = (SampledToken(EOS),), (SampledToken(TOKEN),)


def make_scheduler(
    profile: EngineProfile, policy: str, clock: Callable[[], float], **settings: Any
) -> Scheduler:
    """An engine's scheduler in virtual time, with further settings of EngineConfig."""
    config = EngineConfig(
        model="virtual",
        max_num_seqs=profile.max_num_seqs,
        max_num_batched_tokens=profile.max_num_batched_tokens,
        enable_prefix_caching=False,
        **settings,
    )
    limits = Limits(
        num_blocks=profile.kv_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_model_len=profile.kv_tokens,
        vocab_size=VOCABULARY,
        eos_token_ids=frozenset({EOS}),
    )
    return Scheduler(config, limits, make_policy(policy, {}, clock))


class VirtualEngine:
    """One run of the scheduler with the engine of a profile. No step is computed."""

    def __init__(
        self, profile: EngineProfile, batching: Batching, jobs: Sequence[Job], policy: str = "fcfs"
    ) -> None:
        self._costs = EngineCosts(profile)
        self._batching = batching
        self._jobs = {job.name: job for job in jobs}
        self._arrivals = EventQueue()
        self._queue: deque[Job] = deque()
        for job in jobs:
            self._arrivals.at(job.arrival, self._queue.append, job)
        self._last_arrival = max(job.arrival for job in jobs)
        self._scheduler = make_scheduler(profile, policy, lambda: self._now)
        self.log = Log(jobs)

    @property
    def _now(self) -> float:
        return self._arrivals.now

    def run(self) -> Log:
        """Runs all jobs until they have ended."""
        self._arrivals.run_until(0.0)
        while self._more or self._queue or self._scheduler.has_work:
            self._admit()
            scheduler_output = self._scheduler.schedule()
            self._book(self._scheduler.take_aborted_by_policy())
            if scheduler_output is None:
                self._wait()
            else:
                self._step(scheduler_output)
        self.log.seconds = self._now
        self.log.preemptions = self._scheduler.stats().preemptions
        return self.log

    @property
    def _more(self) -> bool:
        return self._arrivals.next_time < NEVER

    def _admit(self) -> None:
        idle = not self._scheduler.has_work
        for job in self._batching.admit(self._queue, self._now, idle, self._more):
            self._scheduler.add(job.request())

    def _wait(self) -> None:
        """Advances the time to the next arrival, or to the start of a batch if that comes first."""
        if not self._scheduler.has_work and (self._more or self._queue):
            wake = min(self._batching.wake(self._queue), self._arrivals.next_time)
            self._arrivals.run_until(max(self._now, wake))

    def _step(self, scheduler_output: SchedulerOutput) -> None:
        cost = self._batching.cost(scheduler_output, self._costs)
        self._account(scheduler_output, cost.seconds)
        self._arrivals.run_until(self._now + cost.seconds)
        self.log.computed_slots += cost.slots
        self.log.useful_slots += scheduler_output.num_tokens
        self.log.output_slots += cost.output_slots
        sampled = tuple(
            LAST if self._is_last(item.sequence) else OTHER
            for item in scheduler_output.scheduled
            if item.samples
        )
        self._book(self._scheduler.update(scheduler_output, StepResult(sampled)))

    def _is_last(self, sequence: EngineSequence) -> bool:
        return sequence.output_length + 1 >= self._jobs[sequence.request.request_id].output

    def _account(self, scheduler_output: SchedulerOutput, seconds: float) -> None:
        """Adds the KV slots reserved and used during the step, and the service of each tenant."""
        used = self._scheduler.kv_cache.pool.num_used * BLOCK_SIZE
        self.log.reserved_seconds += seconds * self._batching.reserved(used)
        ends_at = {item.sequence: item.start + item.length for item in scheduler_output.scheduled}
        filled = sum(
            ends_at.get(each, each.num_computed_tokens) for each in self._scheduler.running()
        )
        self.log.used_seconds += seconds * filled
        if self._now > self._last_arrival:
            return
        for item in scheduler_output.scheduled:
            sequence = item.sequence
            prompt = max(0, min(ends_at[sequence], sequence.prompt_length) - item.start)
            tokens = INPUT_WEIGHT * prompt + OUTPUT_WEIGHT * item.samples
            tenant = sequence.request.tenant
            self.log.service[tenant] = self.log.service.get(tenant, 0.0) + tokens

    def _book(self, outputs: Sequence[SequenceOutput]) -> None:
        for output in outputs:
            if output.token_ids:
                self.log.token(output.request_id, self._now)
            if output.finish_reason is FinishReason.ABORT:
                self.log.shed.add(output.request_id)
            elif output.finish_reason is not None:
                self.log.completed.add(output.request_id)
