"""Encoders of transformers, whose hidden states become embeddings, and cross-encoders.

A step's prompts go through the library's model in padded batches of similar lengths, each prompt
whole. There is no KV cache: nothing of a prompt is kept after its step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from headrace_common.text.errors import TokenizerError
from headrace_common.text.tokenizer import Tokenizer

from ...checkpoints.checkpoint import Checkpoint, read_json
from ...core.attention_backend import LayerCache
from ...core.errors import ConfigError
from ..base import ForwardBatch, KVShape
from ..registry import LoadedModel, LoadOptions
from ..transformers.transformers_model import (
    auto_config,
    check_missing,
    check_quantization,
    from_pretrained,
    pack,
    refuse,
)
from ..weights.weights import scan
from .encoder_families import EncoderFamily, encoder_family

SENTENCE_CONFIG = "sentence_bert_config.json"
# A prompt shorter than this share of a batch's longest goes into the next batch.
SHORTEST = 0.75


class TransformersEncoder:
    """An encoder behind the CausalModel interface, so that runners need no second one: `forward`
    returns hidden states [R, H] of prompts that are whole in the batch, and uses no cache."""

    def __init__(self, model: Any, padding: int) -> None:
        self._model, self._padding = model, padding
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.kv_shapes: tuple[KVShape, ...] = ()

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        lengths = batch.metadata.query_start.diff().tolist()
        states = self.encode(torch.split(batch.input_ids, lengths))
        return torch.cat(states).index_select(0, batch.logits_rows)

    def encode(self, prompts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The hidden states [length, H] of each prompt."""
        states = list(prompts)
        for group in group_by_length([len(prompt) for prompt in prompts]):
            found = self._encode([prompts[index] for index in group])
            for index, state in zip(group, found, strict=True):
                states[index] = state
        return states

    def _encode(self, prompts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """`encode` for prompts of similar lengths."""
        lengths = [len(prompt) for prompt in prompts]
        ids = pad_sequence(prompts, batch_first=True, padding_value=self._padding)
        ends = torch.tensor(lengths, device=ids.device)
        real = torch.arange(ids.shape[1], device=ids.device) < ends[:, None]
        return torch.split(self._states(ids, real)[real], lengths)

    def _states(self, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """The states [prompts, length, H] of padded prompts."""
        hidden: torch.Tensor = self._model(
            input_ids=ids, attention_mask=real.long()
        ).last_hidden_state
        return hidden


class CrossEncoder(TransformersEncoder):
    """A classifier with one label: each token's state [R, 1] is the score of its pair of texts.

    `separator` ends the first text, after which tokens are of the second type; None if the model
    has one type. With `sigmoid` scores are between 0 and 1.
    """

    def __init__(self, model: Any, padding: int, separator: int | None, *, sigmoid: bool) -> None:
        super().__init__(model, padding)
        self._separator, self._sigmoid = separator, sigmoid

    def _states(self, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids": ids, "attention_mask": real.long()}
        if self._separator is not None:
            ends = (ids == self._separator).long()
            inputs["token_type_ids"] = ((ends.cumsum(dim=1) - ends) > 0).long() * real
        scores: torch.Tensor = self._model(**inputs).logits.float()
        if self._sigmoid:
            scores = scores.sigmoid()
        return scores[:, None, :].expand(-1, ids.shape[1], -1)


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Groups indices so that padding to a group's longest adds little."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    groups: list[list[int]] = []
    for index in order:
        if groups and lengths[index] >= SHORTEST * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def load(checkpoint: Checkpoint, options: LoadOptions) -> LoadedModel:
    """Loads an encoder. Raises ConfigError or CheckpointError with the reason."""
    from transformers import (
        AutoModel,
        AutoModelForPreTraining,
        AutoModelForSequenceClassification,
    )

    family = encoder_family(checkpoint)
    assert family is not None, "only encoders are loaded here"
    check_quantization(checkpoint, options)
    config = auto_config(checkpoint)
    length = _context(checkpoint, family, config, options.positions)
    scan(checkpoint.folder)  # safetensors only, with our messages
    kind: Any = AutoModelForSequenceClassification if checkpoint.scores_pairs else AutoModel
    if family.of_tokens:
        kind = AutoModelForPreTraining
    model, report = from_pretrained(kind, checkpoint, options, config)
    # Only classifiers use the pooling layer; checkpoints may lack its weights.
    check_missing(checkpoint, report, lambda name: name.startswith("pooler."))
    if getattr(model, "pooler", None) is not None and not checkpoint.scores_pairs:
        model.pooler = None
    model = model.to(options.device).eval()
    pack(model, options)
    if family.of_tokens:
        return LoadedModel(_of_tokens(model), length)
    if family.dual:
        return LoadedModel(_dual(checkpoint, family, config, model), length)
    padding = config.pad_token_id or 0
    if not checkpoint.scores_pairs:
        return LoadedModel(TransformersEncoder(model, padding), length)
    separator = _separator(checkpoint) if getattr(config, "type_vocab_size", 1) > 1 else None
    scored = CrossEncoder(model, padding, separator, sigmoid=_sigmoid(checkpoint))
    return LoadedModel(scored, length)


def _of_tokens(model: Any) -> TransformersEncoder:
    from .late_encoder import LateEncoder

    model.vlm.vision_tower = model.vlm.multi_modal_projector = None  # a VisionTower has its own
    return LateEncoder(model)


def _dual(
    checkpoint: Checkpoint, family: EncoderFamily, config: Any, model: Any
) -> TransformersEncoder:
    from .dual_encoder import DualEncoder

    model.vision_model = None  # a VisionTower has its own
    text = config.get_text_config()
    tokenizer = Tokenizer.load(checkpoint.folder)
    padding = tokenizer.token_to_id(tokenizer.special_tokens.get("pad_token", ""))
    if padding is None:
        padding = text.pad_token_id or 0
    return DualEncoder(model, padding, text.max_position_embeddings if family.padded else None)


def _separator(checkpoint: Checkpoint) -> int:
    """The token after each text of a pair."""
    try:
        ids = Tokenizer.load(checkpoint.folder).encode_pair("a", "b")
    except TokenizerError as error:
        raise refuse(checkpoint, f"its pairs cannot be read: {error}") from error
    return ids[-1]


def _sigmoid(checkpoint: Checkpoint) -> bool:
    """Whether scores are made by a sigmoid, as sentence-transformers does unless told otherwise."""
    own = checkpoint.config.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, dict) else None
    name = name or checkpoint.config.get("sbert_ce_default_activation_function")
    return not str(name or "").endswith("Identity")


def _context(checkpoint: Checkpoint, family: EncoderFamily, config: Any, wanted: int | None) -> int:
    """The wanted context, else the length to which sentence-transformers cuts prompts, else the
    number of positions."""
    text = config.get_text_config() if family.dual or family.of_tokens else config
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise refuse(checkpoint, "config.json has no max_position_embeddings")
    if family.counts_after_padding:
        positions -= config.pad_token_id + 1
    if wanted is None:
        return min(positions, _sentence_length(checkpoint) or positions)
    if wanted > positions:
        raise ConfigError(
            f"max_model_len {wanted} is above the longest context of this checkpoint "
            f"({positions}): set at most that"
        )
    return wanted


def _sentence_length(checkpoint: Checkpoint) -> int | None:
    path = checkpoint.folder / SENTENCE_CONFIG
    length = read_json(path).get("max_seq_length") if path.is_file() else None
    if length is not None and (type(length) is not int or length < 1):
        raise ConfigError(f"{path}: max_seq_length must be a number above 0, not {length!r:.40}")
    return length
