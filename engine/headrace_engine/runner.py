"""Carries steps out on the device: owns the model, the KV cache and the sampler.

Does what a plan says and decides nothing about sequences; never calls the scheduler.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from headrace_common.sampling import SamplingParams

from .attention.base import AttentionBackend, LayerCache
from .batch import StepBatch, build
from .chaining import Links, link
from .config import EngineConfig
from .distributed.placing import place
from .distributed.process import Launcher, RankProcess
from .drawing import make_draw
from .errors import ConfigError
from .host_pool import HostPool
from .logprobs import score_prompts
from .lora.adapters import Adapters
from .lora.runtime import ANY, LoRARuntime
from .model.base import CausalModel, ForwardBatch
from .model.cuda_graphs import Decodes, graph_bytes, with_graphs
from .placement import PeerRanks
from .plan import PendingStep, SampleRow, ScheduledSequence, StepPlan, StepResult
from .pooling import Pooler
from .request import EngineRequest, Sequence
from .sampler import Sampler
from .speculation.draft_model import DraftModel
from .submission import Step, Submission, make_submission
from .transfer import Transfer

logger = logging.getLogger(__name__)


class ModelRunner:
    """A loaded model with its KV cache. Made once a process; used by one thread.

    `launch` starts the other ranks where several share the model. `submission` is how steps run
    behind each other; None: what suits the device. Raises CheckpointError,
    ConfigError or RankFailed naming what cannot be loaded or served.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.perf_counter,
        launch: Launcher = RankProcess,
        submission: Submission | None = None,
    ) -> None:
        self._clock = clock
        draft = DraftModel.of(config)
        placed = place(config, launch)
        self._placed, self._model, self._attention = placed, placed.model, placed.attention
        self._device, self._dtype = placed.device, placed.dtype
        self.max_model_len = placed.max_model_len
        self.kv_groups = placed.layout.groups
        self.vocab_size = placed.model.vocab_size
        self.eos_token_ids = placed.eos_token_ids
        self.block_size = config.block_size
        self.pooler_config = placed.pooler_config
        self._pooler = None if placed.pooler_config is None else Pooler(placed.pooler_config)
        draw = make_draw(placed.device, deterministic=config.deterministic)
        self._sampler = Sampler(self.eos_token_ids, placed.ops, draw)
        self._draft = draft
        self._config = config
        self._transfer = Transfer(placed.device)
        self._lora = LoRARuntime.of(config, placed, self._transfer)
        self._submission = submission or make_submission(placed.device, clock)
        self._last: Step | None = None
        self._caches: tuple[LayerCache, ...] = ()
        self.host_pool: HostPool | None = None  # the profile run swaps nothing
        self.num_blocks = self._size_cache()
        self._caches = self._allocate(self.num_blocks)
        if config.swap_space:
            self.host_pool = HostPool(config, self._caches, placed.peers)
        if draft is not None:
            draft.serve(self.num_blocks, self.vocab_size, self.eos_token_ids)
        logger.info("KV cache allocated", extra={"blocks": self.num_blocks})

    @property
    def peers(self) -> PeerRanks | None:
        """The other processes of this model; None: it is all in this one."""
        return self._placed.peers

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def model(self) -> CausalModel:
        return self._model

    @property
    def draft_model(self) -> DraftModel | None:
        """The draft model of speculative decoding, which has as many KV blocks as the target."""
        return self._draft

    @property
    def adapters(self) -> Adapters | None:
        """The LoRA adapters that requests may run with; None where they are not enabled."""
        return None if self._lora is None else self._lora.adapters

    @property
    def attention(self) -> AttentionBackend:
        return self._attention

    @property
    def async_scheduling(self) -> bool:
        """Whether steps are to be submitted one ahead of each other."""
        wanted = self._config.async_scheduling
        return self._device.type == "cuda" if wanted is None else wanted

    def execute(self, plan: StepPlan) -> StepResult:
        """Copies blocks, computes the plan's runs and samples a token for each that asks."""
        begun = self._clock()
        step = Step(plan, self._build(plan))
        self._launch(step)
        result = step.result(0.0)
        if self.host_pool is not None:
            self.host_pool.synchronize()
        return replace(result, seconds=self._clock() - begun)

    def submit(self, plan: StepPlan) -> PendingStep:
        """As execute, behind all steps submitted before; returns at once.

        A plan that was made ahead goes over the plan that was submitted last.
        """
        before = self._last if plan.ahead else None
        links = link(plan, None if before is None else before.plan)
        step = Step(plan, self._build(plan, links), links)
        if len(links.places):
            step.before = before
        self._last = step
        return self._submission.submit(step, self._launch)

    def _build(self, plan: StepPlan, links: Links | None = None) -> StepBatch:
        with torch.inference_mode():
            return build(
                plan,
                self.block_size,
                self._device,
                self._transfer,
                links,
                self._placed.layout,
            )

    def _launch(self, step: Step) -> None:
        """All that the device does for a step, in the order of its stream."""
        plan, batch = step.plan, step.batch
        with torch.inference_mode():
            if self.host_pool is not None:
                step.swapping = self.host_pool.swap(plan)
            if plan.copies:
                self._placed.copy_blocks(self._caches, plan.copies)
            step.take_inputs()
            if self._lora is not None:
                batch = self._lora.extend(plan, batch)
            if self._pooler is not None:
                step.embeddings = self._embed(self._pooler, plan, batch.forward)
                return
            logits = self._model.forward(batch.forward, self._caches)
            if batch.scoring:
                step.scored = score_prompts(logits[len(batch.sampling) :], batch.scoring)
                logits = logits[: len(batch.sampling)]
            if rows := step.rows():
                step.sampled = self._sampler.choose(logits, rows)

    def _embed(
        self, pooler: Pooler, plan: StepPlan, batch: ForwardBatch
    ) -> tuple[bytes | None, ...]:
        rows = pooler.rows(batch.logits_rows, plan.num_tokens)
        hidden = self._model.forward(replace(batch, logits_rows=rows), self._caches)
        return pooler.pool(plan, hidden)

    def warm_up(self) -> None:
        """Runs a small prefill and a decode, so that the first request meets warm code paths.

        Writes into block 0 only; call it before any request runs.
        """
        length = max(1, min(self.block_size, self.max_model_len) - 1)
        prefill = self._dummy_plan(1, length, num_blocks=1)
        self.execute(prefill)
        sequence = prefill.scheduled[0].sequence
        sequence.token_ids.append(0)
        if length < self.block_size:
            step = ScheduledSequence(sequence, length, 1, samples=True)
            self.execute(StepPlan((step,), (), 1))
        if self._lora is not None:
            with torch.inference_mode():
                self._lora.warm_up()
        if self._caches:  # an encoder has none, and decodes nothing
            self._model = with_graphs(self._decodes)
        if self._draft is not None:
            plan = self._dummy_plan(1, 1, num_blocks=1)
            self._draft.execute(plan, (SampleRow(plan.scheduled[0].sequence),))

    def _size_cache(self) -> int:
        per_block = self._placed.block_bytes(self.block_size)
        per_block += 0 if self._draft is None else self._draft.block_bytes
        blocks = self._placed.count_blocks(
            self._config, per_block, self.max_model_len, self._profile
        )
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
        """The largest step: every token of the budget, every sequence sampling, with drafts.
        Returns the bytes that graphs will take."""
        speculation = self._config.speculative_config
        drafts = 0 if speculation is None else speculation.num_speculative_tokens
        budget = self._config.max_num_batched_tokens
        length = min(-(-budget // min(self._config.max_num_seqs, budget)), self.max_model_len)
        sequences = -(-budget // length)
        blocks = -(-length // self.block_size)
        self._caches = self._allocate(blocks)
        lora = None if self._lora is None else ANY
        self.execute(self._dummy_plan(sequences, length, blocks, drafts, lora))
        graphs = self._graph_bytes()
        self._caches = ()
        return graphs

    def _graph_bytes(self) -> int:
        return graph_bytes(self._decodes) if self._caches else 0  # an encoder has none

    @property
    def _decodes(self) -> Decodes:
        lora = None if self._lora is None else self._lora.static
        return Decodes(
            self._model,
            self._attention,
            self._caches,
            self._config,
            self.max_model_len,
            lora,
            self._placed.layout,
        )

    def _dummy_plan(
        self, sequences: int, length: int, num_blocks: int, drafts: int = 0, lora: str | None = None
    ) -> StepPlan:
        assert num_blocks * self.block_size >= length, "a dummy sequence must fit its blocks"
        groups = range(self.kv_groups.count)
        table = [block for block in range(num_blocks) for _ in groups]
        return _zeros_plan(sequences, length, table, drafts, lora)

    def _allocate(self, num_blocks: int) -> tuple[LayerCache, ...]:
        return self._placed.allocate(num_blocks, self.block_size)


def _zeros_plan(
    sequences: int,
    length: int,
    table: list[int],
    drafts: int = 0,
    lora: str | None = None,
) -> StepPlan:
    """Prefills of zeros that all write into the same blocks; of `length` tokens up to `drafts` are
    drafts."""
    drafts = min(drafts, length - 1)
    known = length - drafts
    request = EngineRequest(
        request_id="warm-up",
        prompt_token_ids=(0,) * known,
        params=SamplingParams(),
        seed=0,
        lora=lora,
    )
    return StepPlan(
        tuple(
            ScheduledSequence(
                Sequence(request, index, [0] * known, block_table=table),
                0,
                known,
                samples=True,
                drafts=(0,) * drafts,
            )
            for index in range(sequences)
        ),
        (),
        sequences * length,
    )
