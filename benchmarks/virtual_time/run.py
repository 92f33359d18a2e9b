"""A run: jobs arrive, the scheduler plans, each step takes what the cost model says."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace_engine.config import EngineConfig
from headrace_engine.outputs import SampledToken, SequenceOutput
from headrace_engine.plan import StepPlan, StepResult
from headrace_engine.policies import make_policy
from headrace_engine.request import FinishReason
from headrace_engine.request import Sequence as EngineSequence
from headrace_engine.scheduler import Scheduler
from headrace_engine.validation import Limits

from .batching import Batching
from .cost import CostModel
from .jobs import EOS, TOKEN, VOCABULARY, Job
from .measures import INPUT_WEIGHT, OUTPUT_WEIGHT, Log

BLOCK_SIZE = 16
LAST, OTHER = (SampledToken(EOS),), (SampledToken(TOKEN),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """`max_num_batched_tokens`: the budget of a step; where it is huge, prompts are not chunked."""

    cost: CostModel
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int
    policy: str = "fcfs"
    policy_options: Mapping[str, object] = field(default_factory=dict)

    def limits(self) -> Limits:
        return Limits(
            num_blocks=self.kv_tokens // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_model_len=self.kv_tokens,
            vocab_size=VOCABULARY,
            eos_token_ids=frozenset({EOS}),
        )

    def config(self) -> EngineConfig:
        return EngineConfig(
            model="virtual",
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=False,
        )


class VirtualEngine:
    """One run. Nothing sleeps and nothing is computed: `now` goes on by each step's cost."""

    def __init__(self, setup: Setup, batching: Batching, jobs: Sequence[Job]) -> None:
        self.now = 0.0
        self._setup = setup
        self._batching = batching
        self._jobs = {job.name: job for job in jobs}
        self._arriving = deque(sorted(jobs, key=lambda job: job.arrival))
        self._last_arrival = self._arriving[-1].arrival
        self._queue: deque[Job] = deque()
        policy = make_policy(setup.policy, setup.policy_options, lambda: self.now)
        self._scheduler = Scheduler(setup.config(), setup.limits(), policy)
        self.log = Log(jobs)

    def run(self) -> Log:
        """Runs all jobs to their ends."""
        while self._arriving or self._queue or self._scheduler.has_work:
            self._arrive()
            plan = self._scheduler.plan()
            self._book(self._scheduler.take_shed())
            if plan is None:
                self._wait()
            else:
                self._step(plan)
        self.log.seconds = self.now
        self.log.preemptions = self._scheduler.stats().preemptions
        return self.log

    def _arrive(self) -> None:
        while self._arriving and self._arriving[0].arrival <= self.now:
            self._queue.append(self._arriving.popleft())
        idle = not self._scheduler.has_work
        for job in self._batching.admit(self._queue, self.now, idle, bool(self._arriving)):
            self._scheduler.add(job.request())

    def _wait(self) -> None:
        """Goes to the next arrival, or to when a batch must start without it."""
        if not self._scheduler.has_work and (self._arriving or self._queue):
            wake = self._batching.wake(self._queue)
            arrival = self._arriving[0].arrival if self._arriving else wake
            self.now = max(self.now, min(wake, arrival))

    def _step(self, plan: StepPlan) -> None:
        cost = self._batching.cost(plan, self._setup.cost)
        self._account(plan, cost.seconds)
        self.now += cost.seconds
        self.log.computed_slots += cost.slots
        self.log.useful_slots += plan.num_tokens
        self.log.output_slots += cost.output_slots
        sampled = tuple(
            LAST if self._is_last(item.sequence) else OTHER
            for item in plan.scheduled
            if item.samples
        )
        self._book(self._scheduler.update(plan, StepResult(sampled)))

    def _is_last(self, sequence: EngineSequence) -> bool:
        return sequence.output_length + 1 >= self._jobs[sequence.request.request_id].output

    def _account(self, plan: StepPlan, seconds: float) -> None:
        """KV slots kept and used while the step runs; what each tenant gets by it."""
        used = self._scheduler.kv_cache.pool.num_used * BLOCK_SIZE
        self.log.reserved_seconds += seconds * self._batching.reserved(used)
        ends_at = {item.sequence: item.start + item.length for item in plan.scheduled}
        filled = sum(ends_at.get(each, each.computed) for each in self._scheduler.running())
        self.log.used_seconds += seconds * filled
        if self.now > self._last_arrival:
            return
        for item in plan.scheduled:
            sequence = item.sequence
            prompt = max(0, min(ends_at[sequence], sequence.prompt_length) - item.start)
            got = INPUT_WEIGHT * prompt + OUTPUT_WEIGHT * item.samples
            tenant = sequence.request.tenant
            self.log.service[tenant] = self.log.service.get(tenant, 0.0) + got

    def _book(self, outputs: Sequence[SequenceOutput]) -> None:
        for output in outputs:
            if output.token_ids:
                self.log.token(output.request_id, self.now)
            if output.finish_reason is FinishReason.ABORT:
                self.log.shed.add(output.request_id)
            elif output.finish_reason is not None:
                self.log.completed.add(output.request_id)
