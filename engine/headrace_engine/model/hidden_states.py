"""A native decoder that gives last hidden states where others give logits.

Its head is the identity matrix, which hands each state on unchanged in every implementation of the
decoder, native kernels included; next to the layers it costs nothing. Checkpoints that were saved
without a head, under the names of the bare model, are read too.
"""

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Rows
from dataclasses import replace
from pathlib import Path

import torch

from ..attention.base import LayerCache
from .base import CausalModel, ForwardBatch, KVShape
from .checkpoint import Checkpoint
from .config import ModelConfig
from .layout import Piece
from .loading import LoadProgress
from .parallel import WeightCuts
from .quantization.base import QuantizedFormat
from .tensor_files import scan
from .weights import Shape, WeightReader

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
PREFIX = "model."


class HiddenStates:
    """A CausalModel whose `forward` gives hidden states [R, hidden_size]."""

    def __init__(self, model: CausalModel, vocab_size: int) -> None:
        self._model, self._vocab_size = model, vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        return self._model.kv_shapes

    def forward(self, batch: ForwardBatch, caches: Rows[LayerCache]) -> torch.Tensor:
        return self._model.forward(batch, caches)


class HiddenStateReader(WeightReader):
    """Reads a decoder's weights with an identity matrix as its head.

    `config` is the checkpoint's own, the decoder is made from `without_head` of it.
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
        config: ModelConfig,
    ) -> None:
        names = scan(folder)
        bare = locate(EMBEDDING).stored not in names
        located = _bare(locate) if bare else locate
        super().__init__(folder, dtype, device, located, progress, quantized, cuts)
        self._config = config
        self._eye = torch.eye(config.hidden_size, dtype=dtype, device=device)

    def check(self, expected: Mapping[str, Shape], ignored: Collection[str] = ()) -> None:
        stored = {name: shape for name, shape in expected.items() if name != HEAD}
        stored[EMBEDDING] = (self._config.vocab_size, self._config.hidden_size)
        super().check(stored, {*ignored, HEAD})

    def whole_shape(self, name: str) -> Shape:
        return tuple(self._eye.shape) if name == HEAD else super().whole_shape(name)

    def _load(self, name: str) -> torch.Tensor:
        return self._eye if name == HEAD else super()._load(name)


def without_head(config: ModelConfig) -> ModelConfig:
    """The decoder's shape with hidden states in the place of logits."""
    return replace(
        config,
        vocab_size=config.hidden_size,
        tie_word_embeddings=False,
        logits_softcap=None,
        logits_divisor=None,
    )


def causal(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint of a bare model, under the name of the decoder that it is part of."""
    if not checkpoint.is_bare:
        return checkpoint
    bare = checkpoint.architecture.removesuffix("Model")
    name = f"{bare.removesuffix('Text')}ForCausalLM"
    return replace(checkpoint, config={**checkpoint.config, "architectures": [name]})


def _bare(locate: Callable[[str], Piece]) -> Callable[[str], Piece]:
    def bare(name: str) -> Piece:
        piece = locate(name)
        return replace(piece, stored=piece.stored.removeprefix(PREFIX))

    return bare
