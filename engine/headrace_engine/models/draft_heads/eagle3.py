"""EAGLE-3 (https://arxiv.org/abs/2503.01840): a head trained for one target, as a checkpoint in the
format of the speculators library.

Its input is the target's residual stream before three of the layers, projected to one row, and the
embedding of the next token. Its vocabulary is the target's most frequent tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.config import ModelConfig
from ...checkpoints.fields import Fields
from ...core.attention_backend import AttentionBackend, LayerCache
from ...layers.layers import Linear
from ...operators.base import Ops
from ..base import ForwardBatch
from ..decoder.decoder import Decoder
from ..decoder.decoder_weights import DecoderWeights
from ..decoder.positions import PositionTables
from .base import HeadStates
from .mtp import HeadDecoder, head_config

# Architectures of the head's layer by its model_type.
LAYERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# The number of the target's layers whose input a head reads.
TAPS = 3


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """The shape of a head. `layer` describes the head as a decoder of one layer, with the target's
    vocabulary. The head reads the input of the target's layers `taps`. With `norm_before_fc` that
    input is normed before the projection. The head's residual stream begins with the projected
    states; with `norm_before_residual` they are normed first."""

    layer: ModelConfig
    taps: tuple[int, ...]
    draft_vocab_size: int
    norm_before_residual: bool
    norm_before_fc: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint, target: ModelConfig) -> "EagleConfig":
        """Reads config.json. Raises ConfigError for what is not supported, or does not fit the
        target."""
        fields = Fields(checkpoint.folder / "config.json", checkpoint.config)
        if fields.get("speculators_model_type", None) != "eagle3":
            raise fields.error(
                "speculators_model_type",
                "eagle3 for speculative_config.method eagle3: only heads in the format of the "
                "speculators library are supported, to which it converts others",
            )
        part = fields.object("transformer_layer_config")
        inner = Fields(fields.path, part, prefix="transformer_layer_config.")
        inner.require("model_type", tuple(LAYERS), default="llama")
        inner.require("num_hidden_layers", (1,), default=1)
        for name, wanted in (
            ("hidden_size", target.hidden_size),
            ("vocab_size", target.vocab_size),
        ):
            if inner.integer(name) != wanted:
                raise inner.error(name, f"that of the model, {wanted}")
        fields.require("target_hidden_size", (None, target.hidden_size), default=None)
        named = {**part, "architectures": [LAYERS[str(inner.get("model_type", "llama"))]]}
        layer = ModelConfig.from_hf(replace(checkpoint, config={"num_hidden_layers": 1, **named}))
        return cls(
            layer=replace(head_config(layer), tie_word_embeddings=False),
            taps=_taps(fields, target),
            draft_vocab_size=fields.integer("draft_vocab_size", target.vocab_size),
            norm_before_residual=fields.flag("norm_before_residual"),
            norm_before_fc=fields.flag("norm_before_fc"),
        )


def default_taps(target: ModelConfig) -> tuple[int, ...]:
    """The layers that heads read if their config.json names none."""
    count = target.num_layers
    return (2, count // 2, count - 3)


def _taps(fields: Fields, target: ModelConfig) -> tuple[int, ...]:
    found, layers = fields.get("eagle_aux_hidden_state_layer_ids", None), target.num_layers
    if found is None:
        return default_taps(target)
    right = isinstance(found, list) and len(found) == TAPS and found == sorted(set(found))
    if not right or not all(isinstance(tap, int) and 0 <= tap < layers for tap in found):
        wanted = f"{TAPS} ascending numbers of the target's {layers} layers"
        raise fields.error("eagle_aux_hidden_state_layer_ids", wanted)
    return tuple(found)


class TappedDecoder(Decoder):
    """A decoder that returns states [T, (1 + len(taps)) * H] instead of logits: the normed hidden
    states, then the residual stream before each layer of `taps`. `logits_rows` must name all
    tokens."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        positions: PositionTables,
        ops: Ops,
        attention: AttentionBackend,
        *,
        taps: tuple[int, ...],
    ) -> None:
        super().__init__(config, weights, positions, ops, attention)
        self._taps = taps
        self._tapped: list[torch.Tensor] = []

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        assert len(batch.logits_rows) == len(batch.input_ids), "logits_rows must name all tokens"
        self._tapped = []
        residual = self._embed(batch.input_ids)
        hidden = self._normed(residual, self._layers[0].input_norm)
        hidden, _ = self._run(hidden, residual, batch, caches)
        tapped, self._tapped = self._tapped, []
        return torch.cat((hidden, *tapped), dim=-1)

    def _before_layer(self, index: int, residual: torch.Tensor) -> None:
        if index in self._taps:
            self._tapped.append(residual.clone())


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """The head's weights outside its layer. `token_ids` [draft vocabulary] are the target's ids of
    the head's tokens; None if both use the same ids."""

    input_norm: torch.Tensor | None
    projection: Linear
    hidden_norm: torch.Tensor
    token_ids: torch.Tensor | None


class EagleHead:
    """A loaded EAGLE-3 head."""

    def __init__(
        self,
        config: EagleConfig,
        weights: DecoderWeights,
        own: EagleWeights,
        positions: PositionTables,
        ops: Ops,
        attention: AttentionBackend,
    ) -> None:
        self._decoder = HeadDecoder(config.layer, weights, positions, ops, attention)
        self._config, self._own = config, own
        self.kv_shapes = self._decoder.kv_shapes

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        taps = states[:, self._config.layer.hidden_size :].contiguous()
        if self._own.input_norm is not None:
            taps = self._decoder.norm(taps, self._own.input_norm)
        return self._own.projection(taps)

    def forward(
        self, batch: ForwardBatch, hidden: torch.Tensor, caches: Sequence[LayerCache]
    ) -> HeadStates:
        decoder = self._decoder
        token = decoder.first_norm(decoder.embed(batch.input_ids))
        state = decoder.norm(hidden, self._own.hidden_norm)
        residual = state if self._config.norm_before_residual else hidden
        row = torch.cat((token, state), dim=-1)
        normed, residual = decoder.run(row, residual, batch, caches)
        return HeadStates(residual, normed)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        logits, ids = self._decoder.logits(normed), self._own.token_ids
        if ids is None:
            return logits
        width = self._config.layer.vocab_size
        return logits.new_full((len(logits), width), -torch.inf).index_copy_(1, ids, logits)
