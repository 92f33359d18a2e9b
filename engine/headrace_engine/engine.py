"""The engine: a scheduler and a runner, one step at a time. Synchronous, one thread, no I/O.

The scheduler decides, the runner does; neither knows the other. With asynchronous scheduling the
next step is planned while the device runs one.
"""

import logging
from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Protocol

from .config import EngineConfig
from .kv_groups import KVGroups
from .lora.use import AdapterUse
from .outputs import SequenceOutput
from .pipeline import StepPipeline
from .plan import NO_DRAFTS, PendingStep, StepPlan, StepResult
from .policies import Policy, make_policy
from .pooler_config import PoolerConfig
from .request import EngineRequest, Sequence, SequenceView
from .scheduler import Scheduler
from .speculation.draft_proposer import Drafter
from .speculation.speculator import make_speculator
from .stats import SchedulerStats
from .validation import Limits

logger = logging.getLogger(__name__)


class HostBlocks(Protocol):
    """Host memory for swapped KV."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def bytes_per_block(self) -> int: ...


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
    @property
    def kv_groups(self) -> KVGroups:
        """What the model's layers keep."""

    @property
    def host_pool(self) -> HostBlocks | None:
        """Where KV may be swapped to; None: nowhere."""

    @property
    def pooler_config(self) -> PoolerConfig | None:
        """How a model that embeds does it; None for one that generates."""

    @property
    def draft_model(self) -> Drafter | None:
        """The draft model of speculative decoding, where the configuration names one."""

    @property
    def adapters(self) -> Container[str] | None:
        """Names of the LoRA adapters that requests may run with, of which more may become known."""

    @property
    def async_scheduling(self) -> bool:
        """Whether steps are to be submitted one ahead of each other."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Makes the plan's copies, computes its runs and samples a token for each that asks."""

    def submit(self, plan: StepPlan) -> PendingStep:
        """As execute, behind all steps submitted before; returns at once.

        The sequences are read before it returns, but for tokens below those that the plan names.
        """


class Engine:
    """`policy` replaces the one that the configuration names; no two engines may share one."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        policy: Policy | None = None,
    ) -> None:
        self._runner = runner
        self.max_model_len = runner.max_model_len
        host = runner.host_pool
        limits = Limits(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
            eos_token_ids=runner.eos_token_ids,
            pooler=runner.pooler_config,
            kv_groups=runner.kv_groups,
            adapters=() if runner.adapters is None else runner.adapters,
            num_host_blocks=0 if host is None else host.num_blocks,
            bytes_per_block=0 if host is None else host.bytes_per_block,
        )
        if limits.pooler is not None and not limits.pooler.reuses_prefixes:
            config = replace(config, enable_prefix_caching=False)
        policy = policy or make_policy(config.policy, config.policy_options)
        self._scheduler = Scheduler(config, limits, policy)
        self._speculator = make_speculator(config, runner.draft_model)
        self._pipeline = self._make_pipeline(runner)
        # Ends of resumed choices that had nothing left to do: handed out by the next step.
        self._ended: list[SequenceOutput] = []

    @property
    def has_work(self) -> bool:
        if self._pipeline is not None and self._pipeline.busy:
            return True
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
        if self._pipeline is not None:
            return outputs + self._pipeline.step()
        plan = self._plan()
        outputs += self._scheduler.take_shed()
        if plan is None:
            assert not self._scheduler.has_work, "sequences wait, but none can be scheduled"
            return outputs
        return outputs + self._scheduler.update(plan, self._execute(plan))

    def _make_pipeline(self, runner: Runner) -> StepPipeline | None:
        if not runner.async_scheduling:
            return None
        if self._speculator is not None:
            logger.info("steps wait for each other: drafts follow the last step's tokens")
            return None
        return StepPipeline(self._scheduler, runner.submit)

    def _plan(self) -> StepPlan | None:
        if self._speculator is None:
            return self._scheduler.plan()
        decoding = self._scheduler.draftable()
        return self._scheduler.plan(self._speculator.propose(decoding) if decoding else NO_DRAFTS)

    def _execute(self, plan: StepPlan) -> StepResult:
        result = self._runner.execute(plan)
        if self._speculator is not None:
            self._speculator.observe(plan, result)
        return result

    def sequences(self) -> dict[str, tuple[SequenceView, ...]]:
        """The unfinished sequences by request. Any thread may ask, also while a step hangs."""
        return self._scheduler.sequences()

    def adapters(self) -> AdapterUse | None:
        """Which LoRA adapters are in use; None without them. Any thread may ask."""
        return self._scheduler.adapters()

    def running(self) -> Iterator[Sequence]:
        """The running sequences, as Scheduler.running gives them."""
        return self._scheduler.running()

    def stats(self) -> SchedulerStats:
        stats = self._scheduler.stats()
        if self._speculator is None:
            return stats
        return replace(stats, speculation=self._speculator.stats())
