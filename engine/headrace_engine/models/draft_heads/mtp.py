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
from ...core.attention_backend import LayerCache
from ...core.errors import ConfigError
from ...layers.layers import Linear
from ..base import ForwardBatch
from ..decoder.decoder import Decoder
from ..decoder.parallel_decoder import ParallelDecoder
from .base import HeadStates


@dataclass(frozen=True, slots=True)
class MTPNames:
    """How a family's checkpoint names the tensors of its first MTP layer, and the layer's variants.

    The names of the decoder layer's tensors begin with `layer`, those of all others with `prefix`;
    {} stands for the number of the decoder's layers. `renamed` are parts of the former names that
    differ from Llama's. A layer without `head` or `embedding` shares the decoder's. A `dense` layer
    has an MLP where the decoder's last layer has a mixture; with `windowed` its attention is that
    of the decoder's layers with a window.

    With `hidden_first` the projection's input is the hidden state, then the embedding; otherwise
    the reverse. With `before_norm` the layer reads the target's state before the target's last
    norm. The next draft reads the layer's result, with `follows_norm` after the layer's last norm.
    """

    layer: str = "model.layers.{}."
    prefix: str = "model.layers.{}."
    renamed: tuple[tuple[str, str], ...] = ()
    norm: str = "shared_head.norm"
    head: str | None = "shared_head.head"
    embedding: str | None = "embed_tokens"
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    hidden_first: bool = False
    follows_norm: bool = False
    before_norm: bool = False
    dense: bool = False
    windowed: bool = False

    def projection_of(self, num_layers: int) -> str:
        """The projection's tensor in a checkpoint whose decoder has `num_layers` layers."""
        return f"{self.prefix.format(num_layers)}{self.projection}.weight"


DEEPSEEK = MTPNames()
MIMO = MTPNames(
    layer="model.mtp_layers.0.",
    prefix="model.mtp_layers.0.",
    norm="final_layernorm",
    head=None,
    embedding=None,
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    hidden_first=True,
    before_norm=True,
)
# https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/models/mimo_v2_flash_nextn.py
MIMO_V2 = MTPNames(
    layer="model.mtp.layers.0.",
    prefix="model.mtp.layers.0.",
    renamed=(("post_attention_layernorm", "pre_mlp_layernorm"),),
    norm="final_layernorm",
    head=None,
    embedding=None,
    follows_norm=True,
    dense=True,
    windowed=True,
)
# https://github.com/PaddlePaddle/ERNIE/blob/develop/ernie/modeling_moe.py
ERNIE = MTPNames(
    layer="model.mtp_block.0.",
    prefix="model.",
    norm="norm",
    head=None,
    embedding=None,
    embedding_norm="mtp_emb_norm.0",
    hidden_norm="mtp_hidden_norm.0",
    projection="mtp_linear_proj.0",
    before_norm=True,
    dense=True,
)
# https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/models/longcat_flash_mtp.py
LONGCAT = MTPNames(
    layer="model.mtp.layers.0.",
    prefix="model.mtp.",
    renamed=(("mlp.", "transformer_layer.mlp."),),
    norm="norm",
    head=None,
    embedding_norm="layers.0.enorm.m",
    hidden_norm="layers.0.hnorm.m",
    projection="layers.0.eh_proj",
    follows_norm=True,
    dense=True,
)
FAMILIES: dict[str, MTPNames] = {
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "DeepseekV32ForCausalLM": DEEPSEEK,
    "GlmMoeDsaForCausalLM": DEEPSEEK,
    "Glm4MoeForCausalLM": DEEPSEEK,
    "Glm4MoeLiteForCausalLM": DEEPSEEK,
    "MiMoForCausalLM": MIMO,
    "MiMoV2FlashForCausalLM": MIMO_V2,
    "Ernie4_5_MoeForCausalLM": ERNIE,
    "LongcatFlashForCausalLM": LONGCAT,
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


def head_config(config: ModelConfig, names: MTPNames = DEEPSEEK) -> ModelConfig:
    """The shape of the head as a decoder of one layer: like the decoder's last layer, but with
    attention to all keys, or those that an indexer of its own chooses, unless `names` differ."""
    experts, latent = config.experts, config.latent
    if experts is not None:
        experts = None if names.dense else replace(experts, sparse=experts.sparse[-1:])
    window = next(filter(None, config.windows), None) if names.windowed else None
    if latent is not None and latent.index is not None:
        latent = replace(latent, index=replace(latent.index, shared=frozenset()))
    return replace(
        config,
        num_layers=1,
        windows=(window,),
        chunked=False,
        unrotated=frozenset(),
        local_rope=None if window is None else config.local_rope,
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


class ParallelHeadDecoder(ParallelDecoder, HeadDecoder):
    """One rank's part of a decoder of one layer."""


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

    def __init__(self, decoder: HeadDecoder, own: MTPWeights, names: MTPNames) -> None:
        self._decoder, self._own, self._names = decoder, own, names
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
