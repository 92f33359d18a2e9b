"""Executes steps on the device: owns the model, the KV cache and the sampler.

It decides nothing about sequences and never calls the scheduler.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from headrace_common.sampling.params import SamplingParams

from ..core.attention_backend import LayerCache
from ..core.config import EngineConfig, SleepLevel
from ..core.errors import ConfigError
from ..core.images import ImageLimits
from ..core.request import EngineRequest, Sequence
from ..core.start_phases import OnPhase, ignore_phase
from ..core.step_plan import PendingStep, SampleRow, ScheduledSequence, SchedulerOutput, StepResult
from ..cuda_graphs.cuda_graphs import DecodeRecorder, measure_graphs, record_graphs
from ..device.transfer import Transfer
from ..distributed.loader import load_model
from ..distributed.process import Launcher, RankProcess
from ..lora.adapters import Adapters, LoadedAdapter
from ..models.base import ForwardBatch
from ..models.draft_heads.target import find_target
from ..models.placed_model import PlacedModel
from ..models.vision.image_reader import ImageReader
from ..sampling.logprobs import score_prompts
from ..sampling.pooler import Pooler
from ..sampling.random_sampling import make_random_sampler
from ..sampling.sampler import Sampler
from .async_execution import Step, StepExecutor, make_executor
from .draft_head import DraftHeadRunner
from .draft_model import DraftModel
from .future_tokens import FutureTokens, find_future_tokens
from .host_kv_cache import HostKVCache
from .input_batch import StepBatch, build
from .lora_runtime import ANY, LoRARuntime
from .shared_folder import share_kv_cache
from .sleep import Sleep
from .vision_runtime import VisionRuntime

logger = logging.getLogger(__name__)


class ModelRunner:
    """A loaded model with its KV cache. Made once in a process; used by one thread.

    `peers` are the other processes of the model, None if there is only this one. `draft_model` has
    as many KV blocks as the target; None without one. `draft_head` proposes drafts from its hidden
    states; None without one. `launch` starts the other ranks, if several
    share the model. `executor` runs submitted steps; None: the device's. `on_phase` is told each
    phase of the start. Raises CheckpointError, ConfigError or RankFailed naming what cannot be
    loaded or served.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.perf_counter,
        launch: Launcher = RankProcess,
        executor: StepExecutor | None = None,
        on_phase: OnPhase = ignore_phase,
    ) -> None:
        self._clock, self._config, self._on_phase = clock, config, on_phase
        if config.has_draft_model:
            on_phase("weights")
        self.draft_model = DraftModel.of(config)
        self._load = partial(load_model, config, launch, on_phase)
        placed = self._place()
        on_phase("kv_cache")
        self.device, self.dtype, self.peers = placed.device, placed.dtype, placed.peers
        self.max_model_len = placed.max_model_len
        self.kv_groups = placed.layout.groups
        self.vocab_size = placed.model.vocab_size
        self.eos_token_ids = placed.eos_token_ids
        self.block_size = config.block_size
        self.pooler_config = placed.pooler_config
        self._pooler = None if placed.pooler_config is None else Pooler(placed.pooler_config)
        self._sleep = Sleep(config) if config.enable_sleep_mode else None
        self._recorded = False
        self._transfer = Transfer(placed.device)
        self._lora = LoRARuntime.of(config, placed, self._transfer)
        self._vision = VisionRuntime.of(config, placed, clock)
        self._executor = executor or make_executor(placed.device, clock)
        self._last: Step | None = None
        self.draft_head = self._make_draft_head()
        self._caches: tuple[LayerCache, ...] = ()
        self._model_caches: tuple[LayerCache, ...] = ()  # without the draft head's
        self.host_kv_cache: HostKVCache | None = None  # the profile run swaps no blocks
        self.num_blocks = self._size_cache()
        self._allocate(self.num_blocks)
        if config.swap_space:
            self.host_kv_cache = HostKVCache(config, self._caches, placed.peers)
        self.shared_kv_cache = share_kv_cache(config, placed, self.host_kv_cache)
        if self.draft_model is not None:
            self.draft_model.serve(self.num_blocks, self.vocab_size, self.eos_token_ids)
        logger.info("KV cache allocated", extra={"blocks": self.num_blocks})

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of one token's KV in all layers of all ranks."""
        block_bytes = self._placed.block_bytes(self.block_size) * self._config.tensor_parallel_size
        return block_bytes * self.kv_groups.count / self.block_size

    @property
    def adapters(self) -> Adapters | None:
        """The LoRA adapters that requests may use; None if LoRA is off."""
        return None if self._lora is None else self._lora.adapters

    @property
    def image_limits(self) -> ImageLimits | None:
        """How many images a prompt may have; None if the model reads none."""
        return None if self._vision is None else self._vision.limits

    @property
    def image_reader(self) -> ImageReader | None:
        """Makes the images of requests, in any thread; None if the model reads none."""
        return None if self._vision is None else self._vision.reader

    def read_adapter(self, folder: Path) -> LoadedAdapter:
        """Reads and checks an adapter, in any thread. Raises CheckpointError, ConfigError."""
        return self._with_adapters.adapters.read(folder)

    def install_adapter(self, name: str, adapter: LoadedAdapter) -> None:
        """Adds an adapter between two steps. Its name must not have had other weights."""
        self._with_adapters.adapters.install(name, adapter)

    def remove_adapter(self, name: str) -> None:
        """Forgets, between two steps, an adapter that no request uses."""
        self._with_adapters.remove(name)

    @property
    def _with_adapters(self) -> LoRARuntime:
        """Raises ConfigError if LoRA is off."""
        if self._lora is None:
            raise ConfigError("adapters need enable_lora: switch it on")
        return self._lora

    @property
    def async_scheduling(self) -> bool:
        """Whether the next step is submitted before the result of the last one is known."""
        wanted = self._config.async_scheduling
        return self.device.type == "cuda" if wanted is None else wanted

    def execute(self, scheduler_output: SchedulerOutput) -> StepResult:
        """Copies blocks, computes the step's runs and samples; waits for the result."""
        if not scheduler_output.scheduled:
            return self._save(scheduler_output)
        begun = self._clock()
        step = Step(scheduler_output, self._build(scheduler_output))
        self._launch(step)
        result = step.result(0.0)
        if self.draft_head is not None:
            self.draft_head.read(scheduler_output, result.sampled)
        if self.host_kv_cache is not None:
            self.host_kv_cache.synchronize()
        return replace(result, seconds=self._clock() - begun)

    def submit(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Like `execute`, after all steps submitted before; does not wait for the result.

        A step with `ahead` may read tokens that the step submitted last samples.
        """
        if not scheduler_output.scheduled:
            return _EndedStep(self._save(scheduler_output))
        before = self._last if scheduler_output.ahead else None
        future_tokens = find_future_tokens(
            scheduler_output, None if before is None else before.scheduler_output
        )
        step = Step(scheduler_output, self._build(scheduler_output, future_tokens), future_tokens)
        if len(future_tokens.places):
            step.before = before
        self._last = step
        return self._executor.submit(step, self._launch)

    def _build(
        self, scheduler_output: SchedulerOutput, future_tokens: FutureTokens | None = None
    ) -> StepBatch:
        with torch.inference_mode():
            return build(
                scheduler_output,
                self.block_size,
                self.device,
                self._transfer,
                future_tokens,
                self._placed.layout,
                images=self._vision is not None,
            )

    def _launch(self, step: Step) -> None:
        """Gives the device all work of a step, in the order of its stream."""
        scheduler_output, batch = step.scheduler_output, step.batch
        with torch.inference_mode():
            if self.host_kv_cache is not None:
                step.swapping = self.host_kv_cache.swap(scheduler_output)
                step.saving = self.host_kv_cache.save(scheduler_output)
            if scheduler_output.zeroed:
                self._placed.zero_blocks(self._caches, scheduler_output.zeroed)
            if scheduler_output.copies:
                self._placed.copy_blocks(self._caches, scheduler_output.copies)
            step.take_inputs()
            if self._lora is not None:
                batch = self._lora.extend(scheduler_output, batch)
            if self._vision is not None:
                step.encoding = self._vision.encode(scheduler_output)
                batch = self._vision.extend(scheduler_output, batch)
            if self._pooler is not None:
                step.embeddings = self._embed(self._pooler, scheduler_output, batch.forward)
                return
            logits = self.model.forward(batch.forward, self._model_caches)
            if batch.scoring:
                step.scored = score_prompts(logits[len(batch.sampling) :], batch.scoring)
                logits = logits[: len(batch.sampling)]
            if rows := step.rows():
                step.sampled = self._sampler.choose(logits, rows)

    def _save(self, scheduler_output: SchedulerOutput) -> StepResult:
        """Makes the copies of a step without runs, and waits for them. No step is in flight."""
        assert self.host_kv_cache is not None, "there is memory to copy to"
        times = self.host_kv_cache.save(scheduler_output)
        if times is not None:
            times.wait()
        return StepResult(())

    def _embed(
        self, pooler: Pooler, scheduler_output: SchedulerOutput, batch: ForwardBatch
    ) -> tuple[bytes | None, ...]:
        rows = pooler.rows(batch.logits_rows, scheduler_output.num_tokens)
        hidden = self.model.forward(replace(batch, logits_rows=rows), self._caches)
        return pooler.pool(scheduler_output, hidden)

    def warm_up(self) -> None:
        """Runs a small prefill and a decode and records CUDA graphs, before the first request.

        Writes into block 0 only.
        """
        self._on_phase("warm_up")
        length = max(1, min(self.block_size, self.max_model_len) - 1)
        prefill = self._dummy_step(1, length, num_blocks=1)
        self.execute(prefill)
        sequence = prefill.scheduled[0].sequence
        sequence.token_ids.append(0)
        if length < self.block_size:
            step = ScheduledSequence(sequence, length, 1, samples=True)
            self.execute(SchedulerOutput((step,), (), 1))
        if self.kv_groups.state:
            self._placed.zero_blocks(self._caches, (0,))
        if self._lora is not None:
            with torch.inference_mode():
                self._lora.warm_up()
        self._record()
        self._on_phase("warm_up")
        if self.draft_head is not None:
            self.draft_head.target = find_target(self.model)
        if self.draft_model is not None:
            scheduler_output = self._dummy_step(1, 1, num_blocks=1)
            self.draft_model.execute(
                scheduler_output, (SampleRow(scheduler_output.scheduled[0].sequence),)
            )

    def _record(self) -> None:
        """Records CUDA graphs, if there is a GPU."""
        self._recorded = True
        if self._caches:  # an encoder has no cache, and decodes nothing
            self._on_phase("cuda_graphs")
            self.model = record_graphs(self._recorder)

    def sleep(self, level: SleepLevel) -> None:
        """Gives the KV cache's memory back. Level 1 keeps the weights, on a GPU in host memory;
        level 2 drops them. No step may run until `wake_up`."""
        assert self._sleep is not None, "enable_sleep_mode is off"
        self._last = None
        self.model = self._placed.model  # recorded graphs contain the addresses of the memory
        kept: list[object] = [self._lora]
        if level == 1:
            kept += [self._placed.model, self._placed.attention, self._placed.ops]
        else:
            del self._placed, self.model, self.attention, self._sampler
        self._sleep.begin(level, self.device, kept, self._caches)

    def wake_up(self) -> None:
        """Takes the memory again, after level 2 with weights that are read again.

        Raises CheckpointError if the checkpoint is not the same any more.
        """
        assert self._sleep is not None, "enable_sleep_mode is off"
        if self._sleep.dropped:
            self._sleep.check()
            self._place()
        self._sleep.end()
        if self._recorded:
            self._record()

    def _place(self) -> PlacedModel:
        """Loads the model, and makes what computes with it."""
        placed = self._load()
        self._placed, self.model, self.attention = placed, placed.model, placed.attention
        random_sampler = make_random_sampler(
            placed.device, deterministic=self._config.deterministic
        )
        self._sampler = Sampler(placed.eos_token_ids, placed.ops, random_sampler)
        return placed

    def _size_cache(self) -> int:
        per_block = self._placed.block_bytes(self.block_size)
        per_block += 0 if self.draft_model is None else self.draft_model.block_bytes
        blocks = self._placed.count_blocks(
            self._config, per_block, self.max_model_len, self._profile
        )
        if self.draft_head is not None and self._config.num_blocks is None:
            scratch = self.draft_head.scratch_blocks
            scratch *= self._placed.head_block_bytes(self.block_size)
            blocks = max(1, blocks - -(-scratch // per_block))
        wanted = self.kv_groups.blocks(self.max_model_len, self.block_size)
        if blocks < wanted and self._config.max_model_len is not None:
            raise ConfigError(
                f"max_model_len {self.max_model_len} needs {wanted} KV blocks, but there is room "
                f"for {blocks}: lower max_model_len or give the engine more KV memory"
            )
        if blocks < wanted:
            self.max_model_len = self.kv_groups.capacity(blocks, self.block_size)
            logger.warning(
                "context shortened to what the KV cache holds",
                extra={"max_model_len": self.max_model_len},
            )
        return blocks

    def _profile(self) -> int:
        """Runs the largest step: the whole token budget, all sequences sampling, with drafts.

        Returns the bytes that CUDA graphs and encoded images are going to need.
        """
        speculation = self._config.speculative_config
        drafts = 0 if speculation is None else speculation.num_speculative_tokens
        budget = self._config.max_num_batched_tokens
        length = min(-(-budget // min(self._config.max_num_seqs, budget)), self.max_model_len)
        sequences = -(-budget // length)
        blocks = -(-length // self.block_size)
        self._allocate(blocks)
        lora = None if self._lora is None else ANY
        self.execute(self._dummy_step(sequences, length, blocks, drafts, lora))
        graphs = measure_graphs(self._recorder) if self._caches else 0  # an encoder has no cache
        self._caches, self._model_caches = (), ()
        return graphs + (0 if self._vision is None else self._config.encoder_cache_bytes)

    @property
    def _recorder(self) -> DecodeRecorder:
        lora = None if self._lora is None else self._lora.static
        return DecodeRecorder(
            self.model,
            self.attention,
            self._model_caches,
            self._config,
            self.max_model_len,
            lora,
            self._placed.layout,
        )

    def _dummy_step(
        self, sequences: int, length: int, num_blocks: int, drafts: int = 0, lora: str | None = None
    ) -> SchedulerOutput:
        """Prefills of token 0, all in the same blocks; up to `drafts` tokens are drafts."""
        assert num_blocks * self.block_size >= length, "a dummy sequence must fit its blocks"
        table = [block for block in range(num_blocks) for _ in range(self.kv_groups.count)]
        state = [0] * self.kv_groups.state
        drafts = min(drafts, length - 1)
        known = length - drafts
        request = EngineRequest(
            request_id="warm-up",
            prompt_token_ids=(0,) * known,
            params=SamplingParams(),
            seed=0,
            lora=lora,
        )
        scheduled = [
            ScheduledSequence(
                Sequence(request, index, [0] * known, block_table=table, state_blocks=state),
                0,
                known,
                samples=True,
                drafts=(0,) * drafts,
            )
            for index in range(sequences)
        ]
        return SchedulerOutput(tuple(scheduled), (), sequences * length)

    def _allocate(self, num_blocks: int) -> None:
        """Allocates the KV cache: the model's layers, then the draft head's."""
        head, own = self.draft_head, len(self.model.kv_shapes)
        scratch = 0 if head is None else head.scratch_blocks
        self._caches = self._placed.allocate(num_blocks, self.block_size, scratch)
        self._model_caches = self._caches if head is None else self._caches[:own]
        if head is not None:
            head.use(self._caches[own:], num_blocks)

    def _make_draft_head(self) -> DraftHeadRunner | None:
        head = self._placed.draft_head
        if head is None:
            return None
        target = find_target(self.model)
        return DraftHeadRunner(head, target, self._placed, self._config, self._sampler)


@dataclass(frozen=True, slots=True)
class _EndedStep:
    """A step that had ended when it was submitted."""

    ended: StepResult

    def result(self) -> StepResult:
        return self.ended
