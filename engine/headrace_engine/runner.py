"""Carries steps out on the device: owns the model, the KV cache and the sampler.

Does what a plan says and decides nothing about sequences; never calls the scheduler.
"""

import logging

import numpy as np
import torch

from headrace_common.sampling import SamplingParams

from . import attention
from .attention.base import AttentionBackend, KVSpec, LayerCache
from .batch import build
from .config import EngineConfig
from .errors import ConfigError
from .kernels.ops import make_ops
from .kv_budget import count_blocks
from .model.base import CausalModel
from .model.checkpoint import Checkpoint, load_checkpoint
from .model.ops import TorchOps
from .model.registry import Placement, load_model
from .model.weights import stored_dtype
from .plan import ScheduledSequence, StepPlan, StepResult
from .request import EngineRequest, Sequence
from .sampler import Sampler

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class ModelRunner:
    """A loaded model with its KV cache. Made once a process; used by one thread.

    Raises CheckpointError or ConfigError naming what cannot be loaded or served.
    """

    def __init__(self, config: EngineConfig) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        checkpoint = load_checkpoint(config.model, config.revision)
        self._device = pick_device(config.device)
        self._dtype = pick_dtype(config.dtype, checkpoint)
        self._attention = attention.select(config.attention_backend, self._device, self._dtype)
        # The reference is plain torch throughout, native kernels included in all else.
        plain = self._attention.name == "reference"
        ops = TorchOps() if plain else make_ops(self._device)
        placement = Placement(
            self._device,
            self._dtype,
            self._attention,
            ops,
            config.max_model_len,
            config.quantization,
        )
        with torch.inference_mode():
            loaded = load_model(config, checkpoint, placement)
        self._model: CausalModel = loaded.model
        self.max_model_len = loaded.max_model_len
        self.vocab_size = self._model.vocab_size
        self.eos_token_ids = frozenset(checkpoint.eos_token_ids)
        self.block_size = config.block_size
        self._sampler = Sampler(self.eos_token_ids, ops)
        self._config = config
        self._caches: tuple[LayerCache, ...] = ()
        self.num_blocks = self._size_cache()
        self._caches = self._allocate(self.num_blocks)
        logger.info("KV cache allocated", extra={"blocks": self.num_blocks})

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
    def attention(self) -> AttentionBackend:
        return self._attention

    def execute(self, plan: StepPlan) -> StepResult:
        """Copies blocks, computes the plan's runs and samples a token for each that asks."""
        with torch.inference_mode():
            if plan.copies:
                self._copy(plan.copies)
            batch = build(plan, self.block_size, self._device)
            logits = self._model.forward(batch.forward, self._caches)
            if not batch.sampling:
                return StepResult(())
            return StepResult(self._sampler.sample(logits, batch.sampling))

    def warm_up(self) -> None:
        """Runs a small prefill and a decode, so that the first request meets warm code paths.

        Writes into block 0 only; call it before any request runs.
        """
        length = max(1, min(self.block_size, self.max_model_len) - 1)
        prefill = _dummy_plan(1, length, self.block_size, num_blocks=1)
        self.execute(prefill)
        sequence = prefill.scheduled[0].sequence
        sequence.token_ids.append(0)
        if length < self.block_size:
            step = ScheduledSequence(sequence, length, 1, samples=True)
            self.execute(StepPlan((step,), (), 1))

    def _copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        pairs = torch.from_numpy(np.array(copies, dtype=np.int64)).to(self._device)
        for cache in self._caches:
            self._attention.copy_blocks(cache, pairs)

    def _size_cache(self) -> int:
        per_block = sum(self._attention.block_bytes(spec) for spec in self._specs())
        blocks = count_blocks(
            self._config, self._device, per_block, self.max_model_len, self._profile
        )
        wanted = -(-self.max_model_len // self.block_size)
        if blocks < wanted and self._config.max_model_len is not None:
            raise ConfigError(
                f"max_model_len {self.max_model_len} needs {wanted} KV blocks, but there is room "
                f"for {blocks}: lower max_model_len or give the engine more KV memory"
            )
        if blocks < wanted:
            self.max_model_len = blocks * self.block_size
            logger.warning(
                "context shortened to what the KV cache holds",
                extra={"max_model_len": self.max_model_len},
            )
        return blocks

    def _profile(self) -> None:
        """The largest step: every token of the budget, every sequence sampling."""
        budget = self._config.max_num_batched_tokens
        length = min(-(-budget // min(self._config.max_num_seqs, budget)), self.max_model_len)
        sequences = -(-budget // length)
        blocks = -(-length // self.block_size)
        self._caches = self._allocate(blocks)
        self.execute(_dummy_plan(sequences, length, self.block_size, blocks))
        self._caches = ()

    def _allocate(self, num_blocks: int) -> tuple[LayerCache, ...]:
        return tuple(self._attention.allocate(num_blocks, spec) for spec in self._specs())

    def _specs(self) -> list[KVSpec]:
        return [
            KVSpec(shape.num_kv_heads, shape.head_dim, self.block_size, self._dtype, self._device)
            for shape in self._model.kv_shapes
        ]


def pick_device(name: str) -> torch.device:
    """The device of a setting; `auto` is the first GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known to torch: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, not {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but torch finds no CUDA device")
    return device


def pick_dtype(name: str, checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of a setting; `auto` is the checkpoint's, by config.json or by its tensors."""
    if name == "auto":
        name = checkpoint.dtype_name or "stored"
    if name == "stored":
        stored = stored_dtype(checkpoint.folder)
        return torch.float32 if stored is torch.float64 else stored
    if name not in DTYPES:
        raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPES)}, not {name!r}")
    return DTYPES[name]


def _dummy_plan(sequences: int, length: int, block_size: int, num_blocks: int) -> StepPlan:
    """Prefills of zeros that all write into the same blocks."""
    blocks = list(range(num_blocks))
    assert num_blocks * block_size >= length, "a dummy sequence must fit its blocks"
    request = EngineRequest(
        request_id="warm-up", prompt_token_ids=(0,) * length, params=SamplingParams(), seed=0
    )
    return StepPlan(
        tuple(
            ScheduledSequence(
                Sequence(request, index, [0] * length, block_table=blocks), 0, length, samples=True
            )
            for index in range(sequences)
        ),
        (),
        sequences * length,
    )
