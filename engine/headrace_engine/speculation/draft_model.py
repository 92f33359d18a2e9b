"""A smaller checkpoint with the target's vocabulary, which proposes tokens; with KV of its own."""

import json
import logging
from dataclasses import replace

import torch
from torch.nn import functional as F

from ..attention.base import LayerCache
from ..batch import build
from ..config import EngineConfig
from ..drawing import make_draw
from ..errors import ConfigError
from ..model.checkpoint import load_checkpoint
from ..placement import place_model
from ..plan import SampleRow, StepPlan
from ..sampler import Sampler

logger = logging.getLogger(__name__)

# Checkpoints of one family pad one vocabulary to different sizes; more than this is no padding.
MOST_PADDING = 1024


class DraftModel:
    """Loaded before the target, whose KV budget must leave room for both; serves once it knows it.

    Raises CheckpointError or ConfigError naming what cannot be loaded or served.
    """

    def __init__(self, config: EngineConfig) -> None:
        """`config` is the draft model's own. Of several ranks the first alone has one, whole."""
        self._placed = place_model(config)
        self.block_size = config.block_size
        self.max_model_len = self._placed.max_model_len
        self.vocab_size = self._placed.model.vocab_size
        self.num_blocks = 0
        self._width = self.vocab_size
        self._caches: tuple[LayerCache, ...] = ()
        draw = make_draw(self._placed.device, deterministic=config.deterministic)
        self._sampler = Sampler(self._placed.eos_token_ids, self._placed.ops, draw)

    @classmethod
    def of(cls, config: EngineConfig) -> "DraftModel | None":
        """The draft model that an engine's configuration names, if it does."""
        speculation = config.speculative_config
        if speculation is None or speculation.model is None:
            return None
        _check_vocabularies(config, speculation.model, speculation.revision)
        own = replace(
            config,
            model=speculation.model,
            revision=speculation.revision,
            quantization=speculation.quantization,
            max_model_len=speculation.max_model_len,
            speculative_config=None,
            disable_hybrid_kv_cache_manager=True,
            tensor_parallel_size=1,
        )
        return cls(own)

    @property
    def block_bytes(self) -> int:
        return self._placed.block_bytes(self.block_size)

    def serve(self, num_blocks: int, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Gets its KV memory, and takes over the target's vocabulary and end tokens, so that
        sampling parameters mean the same for both."""
        if abs(self.vocab_size - vocab_size) > MOST_PADDING:
            raise ConfigError(
                f"speculative_config.model has {self.vocab_size} tokens, the model {vocab_size}: "
                "a draft model must have the same vocabulary"
            )
        self.num_blocks, self._width = num_blocks, vocab_size
        self._caches = self._placed.allocate(num_blocks, self.block_size)
        self._sampler = self._sampler.ending_at(eos_token_ids)
        logger.info("draft model ready", extra={"blocks": num_blocks})

    def execute(self, plan: StepPlan, rows: tuple[SampleRow, ...]) -> tuple[int | None, ...]:
        """Computes the plan's runs, which have no drafts, and samples as the target would: what
        `rows` say, one for each run that samples. None where the logits are broken."""
        with torch.inference_mode():
            if plan.copies:
                self._placed.copy_blocks(self._caches, plan.copies)
            batch = build(plan, self.block_size, self._placed.device)
            logits = self._placed.model.forward(batch.forward, self._caches)
            if not rows:
                return ()
            chosen = self._sampler.sample(self._widen(logits), rows)
            return tuple(None if token is None else token.token_id for token in chosen)

    def _widen(self, logits: torch.Tensor) -> torch.Tensor:
        """As many columns as the target has: padding is cut off, what is not known never drawn."""
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
    """Tokens and their ids by tokenizer.json; None for a checkpoint that has none."""
    file = load_checkpoint(model, revision).folder / "tokenizer.json"
    if not file.exists():
        return None
    found: object = json.loads(file.read_bytes()).get("model", {}).get("vocab")
    return found
