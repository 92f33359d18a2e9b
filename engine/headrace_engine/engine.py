"""The engine: a scheduler and a runner, one step at a time. Synchronous, one thread, no I/O.

The scheduler decides, the runner does; neither knows the other.
"""

from typing import Protocol

from .config import EngineConfig
from .outputs import SequenceOutput
from .plan import StepPlan, StepResult
from .policies import Policy, make_policy
from .request import EngineRequest
from .scheduler import Scheduler
from .stats import SchedulerStats
from .validation import Limits


class Runner(Protocol):
    """What carries a step out on the device. `max_model_len` counts prompt and output tokens."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Makes the plan's copies, computes its runs and samples a token for each that asks."""


class Engine:
    """`policy` replaces the one that the configuration names; no two engines may share one."""

    def __init__(self, config: EngineConfig, runner: Runner, policy: Policy | None = None) -> None:
        self._runner = runner
        self.max_model_len = runner.max_model_len
        limits = Limits(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
            eos_token_ids=runner.eos_token_ids,
        )
        policy = policy or make_policy(config.policy, config.policy_options)
        self._scheduler = Scheduler(config, limits, policy)
        # Ends of resumed choices that had nothing left to do: handed out by the next step.
        self._ended: list[SequenceOutput] = []

    @property
    def has_work(self) -> bool:
        return bool(self._ended) or self._scheduler.has_work

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request. Raises RequestError where it cannot run here."""
        self._ended += self._scheduler.add(request)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Ends a request, or one choice of it, which gives no more outputs; unknown is no error."""
        self._scheduler.abort(request_id, choice)
        self._ended = [
            output
            for output in self._ended
            if output.request_id != request_id or choice not in (None, output.choice)
        ]

    def step(self) -> list[SequenceOutput]:
        """One iteration of all running sequences; no output where there is no work."""
        outputs, self._ended = self._ended, []
        plan = self._scheduler.plan()
        outputs += self._scheduler.take_shed()
        if plan is None:
            assert not self._scheduler.has_work, "sequences wait, but none can be scheduled"
            return outputs
        return outputs + self._scheduler.update(plan, self._runner.execute(plan))

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()
