"""Multi-token prediction (MTP): one more layer after a decoder's last, which predicts a further
token.

The embedding of the next token and the target's last hidden state are normed and projected to one
row. A layer like the decoder's computes that row (DeepSeek-V3, https://arxiv.org/abs/2412.19437).
The head shares the decoder's embedding and output matrix, unless the checkpoint has others for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.config import ModelConfig
from ...core.attention_backend import AttentionBackend, LayerCache
from ...core.errors import ConfigError
from ...layers.layers import Linear
from ...operators.base import Ops
from ..base import ForwardBatch
from ..decoder.decoder import Decoder
from ..decoder.decoder_weights import DecoderWeights
from ..decoder.positions import PositionTables
from .base import HeadStates


@dataclass(frozen=True, slots=True)
class MTPNames:
    """How a family's checkpoint names the tensors of its first MTP layer, and the layer's variants.

    All names begin with `prefix`, in which {} stands for the number of the decoder's layers. With
    `hidden_first` the projection's input is the hidden state, then the embedding; otherwise the
    reverse. With `before_norm` the layer reads the target's state before the target's last norm.
    The next draft reads the layer's result, with `follows_norm` after the layer's last norm.
    """

    prefix: str = "model.layers.{}."
    norm: str = "shared_head.norm"
    head: str = "shared_head.head"
    embedding: str = "embed_tokens"
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    hidden_first: bool = False
    follows_norm: bool = False
    before_norm: bool = False

    def projection_of(self, num_layers: int) -> str:
        """The projection's tensor in a checkpoint whose decoder has `num_layers` layers."""
        return f"{self.prefix.format(num_layers)}{self.projection}.weight"


DEEPSEEK = MTPNames()
MIMO = MTPNames(
    prefix="model.mtp_layers.0.",
    norm="final_layernorm",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    hidden_first=True,
    before_norm=True,
)
FAMILIES: dict[str, MTPNames] = {
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "DeepseekV32ForCausalLM": DEEPSEEK,
    "GlmMoeDsaForCausalLM": DEEPSEEK,
    "Glm4MoeForCausalLM": DEEPSEEK,
    "Glm4MoeLiteForCausalLM": DEEPSEEK,
    "MiMoForCausalLM": MIMO,
}


def mtp_names(checkpoint: Checkpoint, config: ModelConfig) -> MTPNames:
    """The names of a checkpoint's layer. Raises ConfigError if it has none that is supported."""
    found = FAMILIES.get(checkpoint.architecture)
    if found is None:
        raise ConfigError(
            f"speculative_config.method mtp supports {', '.join(FAMILIES)}, not "
            f"{checkpoint.architecture}: use method ngram, draft_model or eagle3"
        )
    if config.draft_layers < 1:
        raise ConfigError(
            f"speculative_config.method is mtp, but {checkpoint.folder / 'config.json'} has "
            "num_nextn_predict_layers 0: the checkpoint has no layer that predicts further tokens"
        )
    return found


def head_config(config: ModelConfig) -> ModelConfig:
    """The shape of the head as a decoder of one layer: like the decoder's last layer, but with
    attention to all keys, or those that an indexer of its own chooses."""
    experts, latent = config.experts, config.latent
    if experts is not None:
        experts = replace(experts, sparse=experts.sparse[-1:])
    if latent is not None and latent.index is not None:
        latent = replace(latent, index=replace(latent.index, shared=frozenset()))
    return replace(
        config,
        num_layers=1,
        windows=(None,),
        chunked=False,
        unrotated=frozenset(),
        local_rope=None,
        experts=experts,
        latent=latent,
        kv_scales=None,
        draft_layers=0,
    )


class HeadDecoder(Decoder):
    """A decoder of one layer; a draft head computes the layer's input."""

    def run(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        batch: ForwardBatch,
        caches: Sequence[LayerCache],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the layer on its first product's input and the residual stream. Returns the rows
        that `logits_rows` names, after the last norm and before it."""
        return self._run(hidden, residual, batch, caches)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._embed(ids)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._normed(x, weight)

    def first_norm(self, x: torch.Tensor) -> torch.Tensor:
        return self._normed(x, self._layers[0].input_norm)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        return self._finished(self._lm_head(normed))


@dataclass(frozen=True, slots=True)
class MTPWeights:
    """The head's weights outside its layer. `target_norm` is the target's last norm, if the head
    reads the states before it."""

    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    projection: Linear
    target_norm: torch.Tensor | None = None


class MTPHead:
    """A loaded MTP layer."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        own: MTPWeights,
        names: MTPNames,
        positions: PositionTables,
        ops: Ops,
        attention: AttentionBackend,
    ) -> None:
        self._decoder = HeadDecoder(config, weights, positions, ops, attention)
        self._own, self._names = own, names
        self.kv_shapes = self._decoder.kv_shapes
        self._inverse: torch.Tensor | None = None
        if own.target_norm is not None:
            # Where the weight is 0, nothing of the state is left.
            weight = own.target_norm.float()
            self._inverse = weight.reciprocal().masked_fill(weight == 0, 0.0)

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Undoes the target's last norm if the head reads the states before it. Only the length of
        a state remains unknown, and `hidden_norm` removes it."""
        if self._inverse is None:
            return states
        return (states.float() * self._inverse).to(states.dtype)

    def forward(
        self, batch: ForwardBatch, hidden: torch.Tensor, caches: Sequence[LayerCache]
    ) -> HeadStates:
        decoder, own = self._decoder, self._own
        token = decoder.norm(decoder.embed(batch.input_ids), own.embedding_norm)
        state = decoder.norm(hidden, own.hidden_norm)
        pair = (state, token) if self._names.hidden_first else (token, state)
        residual = own.projection(torch.cat(pair, dim=-1))
        normed, residual = decoder.run(decoder.first_norm(residual), residual, batch, caches)
        return HeadStates(normed if self._names.follows_norm else residual, normed)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(normed)
