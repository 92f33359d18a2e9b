"""A native decoder that returns last hidden states instead of logits.

Its head is the identity matrix, which returns each state unchanged in every implementation of the
decoder, native kernels included; compared with the layers it costs nothing. Checkpoints without a
head, with the names of the bare model, are supported too.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import ModelConfig
from ..checkpoints.loading import LoadProgress
from ..checkpoints.tensor_files import TensorFiles
from ..checkpoints.tensor_info import TensorInfo
from ..core.attention_backend import LayerCache
from ..core.errors import CheckpointError
from .base import CausalModel, ForwardBatch
from .layout import Piece
from .parallel import Shard, WeightCuts
from .quantization.base import QuantizedFormat
from .weights.weights import Shape, WeightReader

HEAD = "lm_head.weight"
_LAYER = "embedding_proj_layer"
EMBEDDING = "model.embed_tokens.weight"
PREFIX = "model."


class Projection:
    """The layer of a model of late interaction that makes vectors [R, size] of hidden states."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return F.linear(states.to(self._weight.dtype), self._weight, self._bias)


class HiddenStates:
    """A CausalModel whose `forward` returns hidden states [R, hidden_size]; `decoder` has an
    identity matrix as its head. With a `projection` it returns what that makes of them."""

    def __init__(
        self, decoder: CausalModel, vocab_size: int, projection: Projection | None = None
    ) -> None:
        self.decoder, self.vocab_size, self.kv_shapes = decoder, vocab_size, decoder.kv_shapes
        self._projection = projection

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        states = self.decoder.forward(batch, caches)
        return states if self._projection is None else self._projection(states)


def read_projection(
    checkpoint: Checkpoint,
    tensors: Mapping[str, TensorInfo],
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard | None,
) -> Projection | None:
    """Reads the projection of hidden states of this size; None for a model without one, and for
    other ranks than the first, which alone has whole states. Raises CheckpointError."""
    size = checkpoint.token_vector_size
    if size is None or (shard is not None and shard.rank > 0):
        return None
    files = TensorFiles(checkpoint.folder, tensors=tensors)
    found = []
    for name, shape in ((f"{_LAYER}.weight", (size, hidden)), (f"{_LAYER}.bias", (size,))):
        info = files.tensors.get(name)
        if info is None or tuple(info.shape) != shape:
            stored = "missing" if info is None else f"of shape {list(info.shape)}"
            raise CheckpointError(f"{checkpoint.folder}: {name} is {stored}, not {list(shape)}")
        found.append(files.load(name).to(device, dtype))
    return Projection(*found)


class HiddenStateReader(WeightReader):
    """Reads a decoder's weights with an identity matrix as its head.

    `config` is the checkpoint's own; the decoder is made from `without_head(config)`.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        locate: Callable[[str], Piece],
        progress: LoadProgress,
        quantized: QuantizedFormat | None,
        cuts: WeightCuts | None,
        tensors: Mapping[str, TensorInfo],
        config: ModelConfig,
    ) -> None:
        bare = locate(EMBEDDING).stored not in tensors
        located = _bare(locate) if bare else locate
        super().__init__(folder, dtype, device, located, progress, quantized, cuts, tensors)
        self._config = config
        self._eye = torch.eye(config.hidden_size, dtype=dtype, device=device)

    def check(self, expected: Mapping[str, Shape], ignored: Collection[str] = ()) -> None:
        stored = {name: shape for name, shape in expected.items() if name != HEAD}
        stored[EMBEDDING] = (self._config.vocab_size, self._config.hidden_size)
        super().check(stored, {*ignored, HEAD})

    def whole_shape(self, name: str) -> Shape:
        return tuple(self._eye.shape) if name == HEAD else super().whole_shape(name)

    def _load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._eye if name == HEAD else super()._load(name, dtype)


def without_head(config: ModelConfig) -> ModelConfig:
    """The decoder's shape with hidden states instead of logits."""
    return replace(
        config,
        vocab_size=config.hidden_size,
        tie_word_embeddings=False,
        logits_softcap=None,
        logits_divisor=None,
    )


def causal(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint of a bare model, with the architecture of the decoder that contains it."""
    if not checkpoint.has_no_head:
        return checkpoint
    bare = checkpoint.architecture.removesuffix("Model")
    name = f"{bare.removesuffix('Text')}ForCausalLM"
    return replace(checkpoint, config={**checkpoint.config, "architectures": [name]})


def _bare(locate: Callable[[str], Piece]) -> Callable[[str], Piece]:
    def bare(name: str) -> Piece:
        piece = locate(name)
        return replace(piece, stored=piece.stored.removeprefix(PREFIX))

    return bare
