"""The draft model: a smaller checkpoint with the target's vocabulary and its own KV cache."""

import logging
from dataclasses import replace

import torch
from torch.nn import functional as F

from headrace_common.text.checkpoint import read_files
from headrace_common.text.errors import TokenizerError

from ..checkpoints.checkpoint import load_checkpoint
from ..core.attention_backend import LayerCache
from ..core.config import EngineConfig
from ..core.errors import CheckpointError, ConfigError
from ..core.step_plan import SampleRow, SchedulerOutput
from ..model_loader.loader import place_model
from ..sampling.random_sampling import make_random_sampler
from ..sampling.sampler import Sampler
from .input_batch import build

logger = logging.getLogger(__name__)

# Checkpoints of one family pad the same vocabulary to different sizes. A larger difference than
# this means another vocabulary.
MOST_PADDING = 1024


class DraftModel:
    """A loaded draft model.

    It is loaded before the target, so that the measured KV budget leaves room for both, and serves
    after `serve`. Raises CheckpointError or ConfigError naming what cannot be loaded or served.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Loads the model of `config`. Only the first rank has a draft model, unsplit."""
        if "speculators_config" in load_checkpoint(config.model, config.revision).config:
            raise ConfigError(
                f"speculative_config.model {config.model} is a head, not a draft model: set "
                "speculative_config.method eagle3"
            )
        self._placed = place_model(config)
        if self._placed.layout.groups.state:
            raise ConfigError(
                f"speculative_config.model {config.model} has recurrent layers, whose state cannot "
                "follow drafts: use a draft model without, or method ngram"
            )
        self.block_size = config.block_size
        self.max_model_len = self._placed.max_model_len
        self.vocab_size = self._placed.model.vocab_size
        self.num_blocks = 0
        self._width = self.vocab_size
        self._caches: tuple[LayerCache, ...] = ()
        random_sampler = make_random_sampler(
            self._placed.device, deterministic=config.deterministic
        )
        self._sampler = Sampler(self._placed.eos_token_ids, self._placed.ops, random_sampler)

    @classmethod
    def of(cls, config: EngineConfig) -> "DraftModel | None":
        """The draft model of an engine's configuration; None if it names none."""
        speculation = config.speculative_config
        if speculation is None or speculation.method != "draft_model":
            return None
        assert speculation.model is not None, "a draft model has a name"
        _check_vocabularies(config, speculation.model, speculation.revision)
        own = replace(
            config,
            model=speculation.model,
            revision=speculation.revision,
            quantization=speculation.quantization,
            max_model_len=speculation.max_model_len,
            speculative_config=None,
            disable_hybrid_kv_cache_manager=True,
            limit_mm_per_prompt={"image": 0},
            tensor_parallel_size=1,
            nnodes=1,
        )
        return cls(own)

    @property
    def block_bytes(self) -> int:
        return self._placed.block_bytes(self.block_size)

    def serve(self, num_blocks: int, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Allocates the KV cache and takes over the target's vocabulary and end tokens.

        So sampling parameters mean the same for both models.
        """
        if abs(self.vocab_size - vocab_size) > MOST_PADDING:
            raise ConfigError(
                f"speculative_config.model has {self.vocab_size} tokens, the model {vocab_size}: "
                "a draft model must have the same vocabulary"
            )
        self.num_blocks, self._width = num_blocks, vocab_size
        self._caches = self._placed.allocate(num_blocks, self.block_size)
        self._sampler = self._sampler.ending_at(eos_token_ids)
        logger.info("draft model ready", extra={"blocks": num_blocks})

    def execute(
        self, scheduler_output: SchedulerOutput, rows: tuple[SampleRow, ...]
    ) -> tuple[int | None, ...]:
        """Computes runs without drafts and samples `rows`, one for each run that samples.

        Sampling is the target's. A token is None if its logits were NaN or infinite.
        """
        with torch.inference_mode():
            if scheduler_output.copies:
                self._placed.copy_blocks(self._caches, scheduler_output.copies)
            batch = build(scheduler_output, self.block_size, self._placed.device)
            logits = self._placed.model.forward(batch.forward, self._caches)
            if not rows:
                return ()
            chosen = self._sampler.sample(self._widen(logits), rows)
            return tuple(None if token is None else token.token_id for token in chosen)

    def _widen(self, logits: torch.Tensor) -> torch.Tensor:
        """Cuts the logits to the target's vocabulary, or pads them with minus infinity."""
        missing = self._width - self.vocab_size
        if missing <= 0:
            return logits[:, : self._width]
        return F.pad(logits, (0, missing), value=-torch.inf)


def _check_vocabularies(config: EngineConfig, model: str, revision: str | None) -> None:
    target = _vocabulary(config.model, config.revision)
    draft = _vocabulary(model, revision)
    if target is not None and draft is not None and target != draft:
        raise ConfigError(
            f"speculative_config.model {model} has another vocabulary than {config.model}: "
            "its tokens mean something else. Choose one of the same family"
        )


def _vocabulary(model: str, revision: str | None) -> object:
    """The tokens and ids of tokenizer.json; None if the checkpoint has no such file."""
    try:
        files = read_files(load_checkpoint(model, revision).folder)
        found: object = files.json("tokenizer.json").get("model", {}).get("vocab")
    except TokenizerError as error:
        raise CheckpointError(str(error)) from error
    return found
