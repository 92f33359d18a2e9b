"""The engine: a scheduler and a runner, one step at a time. Synchronous, one thread, no I/O.

The scheduler decides, the runner executes; neither knows the other. With asynchronous scheduling
the next step is scheduled while the device runs one.
"""

import logging
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from typing import Protocol

from headrace_common.wire.block_hashes import filter_bits

from ..core.batch_snapshot import BatchSnapshot
from ..core.config import EngineConfig, SleepLevel
from ..core.images import ImageLimits
from ..core.kv_cache_groups import KVGroups
from ..core.outputs import SequenceOutput
from ..core.pooler_config import PoolerConfig
from ..core.request import EngineRequest, Sequence, SequenceView
from ..core.stats import SchedulerStats
from ..core.step_plan import NO_DRAFTS, PendingStep, SchedulerOutput, StepResult
from ..kv_cache.cached_blocks import CachedBlocks
from ..kv_cache.shared_kv_cache import SharedKVCache
from ..scheduler.input_validation import Limits
from ..scheduler.lora_stats import LoRAStats
from ..scheduler.policies import Policy, make_policy
from ..scheduler.scheduler import Scheduler
from ..speculative.draft_proposer import Drafter
from ..speculative.head_proposer import DraftingHead
from ..speculative.speculator import make_speculator
from .step_pipeline import StepPipeline

logger = logging.getLogger(__name__)


class HostKVCacheSize(Protocol):
    """The size of the host memory for swapped KV."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def bytes_per_block(self) -> int: ...


class Runner(Protocol):
    """Executes steps on the device. `max_model_len` counts prompt and output tokens."""

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
        """The groups of layers that keep KV of the same positions."""

    @property
    def host_kv_cache(self) -> HostKVCacheSize | None:
        """The host memory that KV may be swapped to; None if there is none."""

    @property
    def shared_kv_cache(self) -> SharedKVCache | None:
        """The tier of KV that outlives this engine; None if the configuration names none."""

    @property
    def pooler_config(self) -> PoolerConfig | None:
        """How an embedding model pools; None for a model that generates."""

    @property
    def draft_model(self) -> Drafter | None:
        """The draft model of speculative decoding; None if the configuration names none."""

    @property
    def draft_head(self) -> DraftingHead | None:
        """The head that reads the model's hidden states; None if the configuration names none."""

    @property
    def adapters(self) -> Container[str] | None:
        """Names of the LoRA adapters that requests may use; None if LoRA is off. May grow."""

    @property
    def image_limits(self) -> ImageLimits | None:
        """How many images a prompt may have; None if the model reads none."""

    @property
    def async_scheduling(self) -> bool:
        """Whether the next step is submitted before the result of the last one is known."""

    def execute(self, scheduler_output: SchedulerOutput) -> StepResult:
        """Copies the step's blocks, computes its runs, and samples for runs with `samples`."""

    def submit(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Like `execute`, after all steps submitted before; does not wait for the result.

        Tokens that precede a sequence's run may be read later, so the caller must not change them.
        Everything else of the sequences is read before this returns.
        """

    def sleep(self, level: SleepLevel) -> None:
        """Gives memory back until `wake_up`, and loses the KV on the device. No step may follow."""

    def wake_up(self) -> None:
        """Takes the memory again, with the same weights."""


class Engine:
    """A scheduler with its runner, as one object.

    `policy` replaces the configured one; two engines must not share a policy.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        policy: Policy | None = None,
    ) -> None:
        self._runner = runner
        self.max_model_len = runner.max_model_len
        host = runner.host_kv_cache
        limits = Limits(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
            eos_token_ids=runner.eos_token_ids,
            pooler=runner.pooler_config,
            kv_groups=runner.kv_groups,
            adapters=() if runner.adapters is None else runner.adapters,
            images=runner.image_limits,
            num_host_blocks=0 if host is None else host.num_blocks,
            bytes_per_block=0 if host is None else host.bytes_per_block,
        )
        if limits.pooler is not None and not limits.pooler.reuses_prefixes:
            config = replace(config, enable_prefix_caching=False)
        policy = policy or make_policy(config.policy, config.policy_options)
        self._scheduler = Scheduler(config, limits, policy, runner.shared_kv_cache)
        self._speculator = make_speculator(config, runner.draft_model, runner.draft_head)
        self._pipeline = self._make_pipeline(runner)
        # Last outputs of resumed choices that had ended already; the next step returns them.
        self._ended: list[SequenceOutput] = []

    @property
    def has_work(self) -> bool:
        if self._pipeline is not None and self._pipeline.busy:
            return True
        return bool(self._ended) or self._scheduler.has_work

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request. Raises RequestError if it cannot run here."""
        self._ended += self._scheduler.add(request)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Ends a request, or one choice, without further outputs. Ignores unknown requests."""
        self._scheduler.abort(request_id, choice)
        self._ended = [
            output
            for output in self._ended
            if output.request_id != request_id or choice not in (None, output.choice)
        ]

    def step(self) -> list[SequenceOutput]:
        """Runs one step and returns its outputs; empty if there is no work."""
        outputs, self._ended = self._ended, []
        if self._pipeline is not None:
            return outputs + self._pipeline.step()
        scheduler_output = self._schedule()
        outputs += self._scheduler.take_aborted_by_policy()
        if scheduler_output is None:
            self._scheduler.wait_for_work()
            return outputs
        return outputs + self._scheduler.update(scheduler_output, self._execute(scheduler_output))

    def _make_pipeline(self, runner: Runner) -> StepPipeline | None:
        if not runner.async_scheduling:
            return None
        if self._speculator is not None:
            logger.info("no asynchronous scheduling: drafts depend on the last step's tokens")
            return None
        return StepPipeline(self._scheduler, runner.submit)

    def _schedule(self) -> SchedulerOutput | None:
        if self._speculator is None:
            return self._scheduler.schedule()
        decoding = self._scheduler.draftable()
        return self._scheduler.schedule(
            self._speculator.propose(decoding) if decoding else NO_DRAFTS
        )

    def _execute(self, scheduler_output: SchedulerOutput) -> StepResult:
        result = self._runner.execute(scheduler_output)
        if self._speculator is not None and scheduler_output.scheduled:
            self._speculator.observe(scheduler_output, result)
        return result

    def follow_cached_blocks(self) -> CachedBlocks | None:
        """What follows the prefix caches of device and host from now on; None without prefix
        caching. Call it before the first request. Any one thread may take its changes."""
        scheduler = self._scheduler
        if not scheduler.kv_cache.prefix_caching:
            return None
        pools, host = [scheduler.kv_cache.pool], scheduler.host_block_tables
        if scheduler.prefix_tiers is not None and host is not None:
            pools.append(host.pool)
        cached = CachedBlocks(filter_bits(sum(pool.num_blocks for pool in pools)))
        for pool in pools:
            pool.cached = cached
        return cached

    @property
    def shares_kv(self) -> bool:
        """Whether KV goes to a shared tier, through which requests can be handed over."""
        tiers = self._scheduler.prefix_tiers
        return tiers is not None and tiers.shared is not None

    def call_when_shared(self, action: Callable[[], None]) -> None:
        """Has `action` called, in any thread, when the shared tier has the KV of the blocks that
        are full now, as far as it could take them. Between two steps, if the engine `shares_kv`."""
        tiers = self._scheduler.prefix_tiers
        assert tiers is not None
        tiers.call_when_shared(action)

    def sleep(self, level: SleepLevel) -> None:
        """Gives memory back until `wake_up`, between two steps. No request may be left; KV in host
        memory and in the shared tier stays."""
        while self.has_work:  # a step in flight, and copies for the shared tier
            self.step()
        self._scheduler.forget_prefixes()
        self._runner.sleep(level)

    def wake_up(self) -> None:
        self._runner.wake_up()

    def close(self, seconds: float) -> None:
        """Waits until the shared tier has written its KV, at most `seconds`. No step may follow."""
        shared = self._runner.shared_kv_cache
        if shared is not None and not shared.flush(seconds):
            logger.warning("some KV was not written to the shared tier")

    def sequences(self) -> dict[str, tuple[SequenceView, ...]]:
        """The unfinished sequences by request. Callable from any thread, even if a step hangs."""
        return self._scheduler.sequences()

    def snapshot(self, most: int) -> BatchSnapshot:
        """At most `most` unfinished sequences, and the statistics, between two steps."""
        return replace(self._scheduler.snapshot(most), stats=self.stats())

    def lora_stats(self) -> LoRAStats | None:
        """The LoRA adapters in use; None if LoRA is off. Callable from any thread."""
        return self._scheduler.lora_stats()

    def running(self) -> Iterator[Sequence]:
        """The running sequences, as returned by Scheduler.running."""
        return self._scheduler.running()

    def stats(self) -> SchedulerStats:
        stats = self._scheduler.stats()
        if self._speculator is None:
            return stats
        return replace(stats, speculation=self._speculator.stats())
