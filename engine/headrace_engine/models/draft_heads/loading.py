"""Loads a decoder together with its draft head."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.config import ModelConfig
from ...checkpoints.loading import LoadProgress
from ...checkpoints.tensor_files import Shape, TensorFiles, TensorInfo, scan
from ...core.attention_backend import AttentionBackend
from ...core.errors import CheckpointError, ConfigError
from ...layers.layers import Linear
from ...operators.base import Ops
from ..base import CausalModel
from ..decoder.decoder import Decoder, finish_logits
from ..decoder.decoder_tensors import expected_tensors
from ..decoder.decoder_weights import DecoderWeights, make_layer_reader
from ..decoder.fused import FusedDecoder
from ..decoder.parallel_decoder import GatheredHead
from ..decoder.positions import PositionTables
from ..layout import Piece
from ..linear.linear_maker import NO_INT8, LinearMaker, QuantizedOps, computes_natively
from ..linear.native_linear import NativeLinear
from ..parallel import Shard, WeightCuts
from ..quantization.base import QuantizedFormat
from ..weights.weights import EMBEDDING, WeightReader
from .base import DraftHead
from .eagle3 import TAPS, EagleConfig, EagleHead, EagleWeights, TappedDecoder
from .mtp import (
    HeadDecoder,
    MTPHead,
    MTPNames,
    MTPWeights,
    ParallelHeadDecoder,
    head_config,
    mtp_names,
)
from .target import HeadTarget

HEAD = "lm_head.weight"
NORM = "model.norm.weight"
LAYER = "model.layers.0."
# The target's last norm; NORM is the head's.
TARGET_NORM = "target_norm.weight"
# Tensors of an EAGLE-3 head.
PROJECTION, INPUT_NORM, HIDDEN_NORM = "fc.weight", "input_norm.weight", "hidden_norm.weight"
D2T = "d2t"


@dataclass(frozen=True, slots=True)
class HeadSource:
    """The files of a target's checkpoint, and how its layers are made. `tensors` are those that
    the files store; `locate` says where; `quantize` makes int8 of linear layers; `length` is the
    longest sequence in tokens; `shard` is the part of all layers that this process holds."""

    checkpoint: Checkpoint
    tensors: Mapping[str, TensorInfo]
    dtype: torch.dtype
    device: torch.device
    locate: Callable[[str], Piece]
    progress: LoadProgress
    quantized: QuantizedFormat | None
    ops: Ops
    attention: AttentionBackend
    quantize: bool
    length: int
    shard: Shard | None

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    def reader(self, locate: Callable[[str], Piece], config: ModelConfig) -> WeightReader:
        """Reads this process's part of a decoder of this shape."""
        return WeightReader(
            self.folder,
            self.dtype,
            self.device,
            locate,
            self.progress,
            self.quantized,
            None if self.shard is None else WeightCuts(config, self.shard),
            self.tensors,
        )


def check_mtp(
    checkpoint: Checkpoint,
    config: ModelConfig,
    locate: Callable[[str], Piece],
    stored: Container[str],
) -> None:
    """Raises ConfigError if a checkpoint has no layer that predicts further tokens."""
    names = mtp_names(checkpoint, config)
    name = names.projection_of(config.num_layers)
    if locate(name).stored not in stored:
        raise ConfigError(
            f"speculative_config.method is mtp, but {checkpoint.folder} has no tensor {name}: the "
            "layer was left out when the checkpoint was made"
        )


def load_mtp(
    config: ModelConfig, body: CausalModel, source: HeadSource
) -> tuple[HeadTarget, DraftHead]:
    """A target, made of a decoder `body` that returns hidden states, and its MTP head. Raises
    ConfigError or CheckpointError."""
    names = mtp_names(source.checkpoint, config)
    paths = _MTPPaths(names, config, source, source.tensors)
    own = head_config(config, names)
    reader = source.reader(paths.locate, own)
    reader.check(paths.expected(own), ignored=("model.", HEAD))
    linears = LinearMaker(reader, source.ops, source.quantize)
    layers = make_layer_reader(own, reader, linears, source.ops)
    embedding = body.embedding if isinstance(body, Decoder) else reader.view(EMBEDDING)
    shared = linears.make((paths.shared_head,))
    weights = DecoderWeights(
        embedding=embedding if paths.embedding is None else reader.read(paths.embedding),
        layers=[layers.layer(0)],
        norm=layers.norm(NORM),
        lm_head=shared if paths.head is None else linears.make((paths.head,)),
    )
    head_weights = MTPWeights(
        layers.norm(f"{names.embedding_norm}.weight"),
        layers.norm(f"{names.hidden_norm}.weight"),
        linears.make((f"{names.projection}.weight",)),
        reader.read(TARGET_NORM) if names.before_norm else None,
    )
    positions = PositionTables(own, source.length, source.device)
    parts = (own, weights, positions, source.ops, source.attention)
    shard = source.shard
    if shard is None:
        decoder = HeadDecoder(*parts)
    else:
        decoder = ParallelHeadDecoder(*parts, shard=shard, embeddings=own.vocab_size)
        shared = GatheredHead(shared, own.vocab_size, shard)
    head = MTPHead(decoder, head_weights, names)
    return make_target(config, body, shared, source.dtype), head


@dataclass(frozen=True, slots=True)
class TappedTarget:
    """The target of an EAGLE-3 head: a decoder that returns states as `TappedDecoder` does, its
    embedding, and its output matrix."""

    body: CausalModel
    embedding: torch.Tensor
    head: Linear


def tapped_target(
    config: ModelConfig, weights: DecoderWeights, source: HeadSource, taps: tuple[int, ...]
) -> TappedTarget:
    """A target that is computed layer by layer."""
    tables = PositionTables(config, source.length, source.device)
    body = TappedDecoder(config, weights, tables, source.ops, source.attention, taps=taps)
    return TappedTarget(body, weights.embedding, weights.lm_head)


def fused_target(config: ModelConfig, body: FusedDecoder, source: HeadSource) -> TappedTarget:
    """A decoder that native kernels compute, whose own output matrix is the identity."""
    head = EMBEDDING if config.tie_word_embeddings else HEAD
    reader = source.reader(source.locate, config)
    shape = (config.vocab_size, config.hidden_size)
    reader.check({EMBEDDING: shape, head: shape}, ignored=("model.", HEAD))
    linears = LinearMaker(reader, source.ops, source.quantize)
    return TappedTarget(body, reader.view(EMBEDDING), linears.make((head,)))


def load_eagle3(
    config: ModelConfig,
    tapped: TappedTarget,
    source: HeadSource,
    checkpoint: Checkpoint,
    quantization: str,
) -> tuple[HeadTarget, DraftHead]:
    """A target and its EAGLE-3 head, which has a separate checkpoint. Raises ConfigError or
    CheckpointError."""
    folder, dtype, device = checkpoint.folder, source.dtype, source.device
    found, stored = EagleConfig.of(checkpoint, config), scan(folder)
    expected = _eagle_tensors(found)
    if _eagle_piece(EMBEDDING).stored not in stored:
        del expected[EMBEDDING]
    reader = WeightReader(folder, dtype, device, _eagle_piece, source.progress)
    reader.check(expected, ignored=(D2T, "t2d", "verifier_norm.weight", "verifier_lm_head.weight"))
    native = computes_natively(source.ops, dtype) or isinstance(source.ops, QuantizedOps)
    if quantization == "int8" and not native:
        raise ConfigError(NO_INT8)
    linears = LinearMaker(reader, source.ops, quantization == "int8")
    layers = make_layer_reader(found.layer, reader, linears, source.ops)
    own = EagleWeights(
        input_norm=layers.norm(INPUT_NORM) if found.norm_before_fc else None,
        projection=linears.make((PROJECTION,)),
        hidden_norm=layers.norm(HIDDEN_NORM),
        token_ids=_token_ids(folder, stored, found, device),
    )
    layer = DecoderWeights(
        embedding=_embedding(reader, tapped.embedding),
        layers=[layers.layer(0)],
        norm=layers.norm(NORM),
        lm_head=linears.make((HEAD,)),
    )
    positions = PositionTables(found.layer, source.length, device)
    made = EagleHead(found, layer, own, positions, source.ops, source.attention)
    return make_target(config, tapped.body, tapped.head, dtype), made


def make_target(
    config: ModelConfig, body: CausalModel, head: Linear, dtype: torch.dtype
) -> HeadTarget:
    """The target whose decoder `body` returns hidden states and whose output matrix is `head`."""

    # The native call returns logits in float32; so does the same product alone.
    whole = isinstance(body, FusedDecoder) and isinstance(head, NativeLinear)
    product = head.product if whole and isinstance(head, NativeLinear) else head

    def to_logits(normed: torch.Tensor) -> torch.Tensor:
        return finish_logits(config, product(normed))

    return HeadTarget(body, to_logits, config.vocab_size, config.hidden_size, dtype)


def _eagle_piece(name: str) -> Piece:
    """Where a head's checkpoint stores a tensor of a decoder of one layer."""
    stored = name.removeprefix("model.")
    return Piece(f"layers.0.{name}" if name == HIDDEN_NORM else stored)


def _eagle_tensors(config: EagleConfig) -> dict[str, Shape]:
    hidden = config.layer.hidden_size
    found = expected_tensors(config.layer)
    for matrix in ("q_proj", "k_proj", "v_proj"):
        name = f"{LAYER}self_attn.{matrix}.weight"
        found[name] = (found[name][0], 2 * hidden)
    found[HEAD] = (config.draft_vocab_size, hidden)
    found[PROJECTION] = (hidden, TAPS * hidden)
    found[HIDDEN_NORM] = (hidden,)
    if config.norm_before_fc:
        found[INPUT_NORM] = (TAPS * hidden,)
    return found


def _embedding(reader: WeightReader, shared: torch.Tensor) -> torch.Tensor:
    """The head's embedding; that of the target if they are the same."""
    if not reader.expects(EMBEDDING):
        return shared
    own = reader.view(EMBEDDING)
    same = own.shape == shared.shape and own.dtype is shared.dtype and torch.equal(own, shared)
    return shared if same else own


def _token_ids(
    folder: Path, stored: Mapping[str, TensorInfo], config: EagleConfig, device: torch.device
) -> torch.Tensor | None:
    """The target's ids of the head's tokens. The tensor D2T has the target's id minus the head's
    for each token."""
    count, whole = config.draft_vocab_size, config.layer.vocab_size
    if D2T not in stored:
        if count != whole:
            raise CheckpointError(
                f"{folder}: missing tensor {D2T}: draft_vocab_size is {count}, and the model has "
                f"{whole} tokens"
            )
        return None
    if stored[D2T].shape != (count,) or stored[D2T].dtype != "I64":
        raise CheckpointError(f"{stored[D2T].file}: {D2T} must have {count} whole numbers (I64)")
    ids = TensorFiles(folder).load(D2T) + torch.arange(count)
    if int(ids.min()) < 0 or int(ids.max()) >= whole or len(set(ids.tolist())) < count:
        raise CheckpointError(
            f"{stored[D2T].file}: {D2T} must name {count} different tokens of the model's {whole}"
        )
    return ids.to(device)


class _MTPPaths:
    """The places of an MTP layer's tensors in a checkpoint. The layer is read as a decoder with
    one layer.

    `embedding` and `head` are None if the layer shares those of the decoder.
    """

    def __init__(
        self,
        names: MTPNames,
        config: ModelConfig,
        source: HeadSource,
        stored: Mapping[str, TensorInfo],
    ) -> None:
        self._names, self._source, self._config = names, source, config
        self._prefix, self._layer = (
            prefix.format(config.num_layers) for prefix in (names.prefix, names.layer)
        )
        self.shared_head = EMBEDDING if config.tie_word_embeddings else HEAD
        self.embedding = self._if_stored(names.embedding, EMBEDDING, stored)
        self.head = self._if_stored(names.head, self.shared_head, stored)

    def locate(self, name: str) -> Piece:
        return self._source.locate(self._renamed(name))

    def expected(self, own: ModelConfig) -> dict[str, Shape]:
        """The shapes of the head's tensors, shared ones included, in the order of reading."""
        names, hidden = self._names, own.hidden_size
        shapes = expected_tensors(own)
        found = {EMBEDDING: shapes[EMBEDDING]}
        found[self.shared_head] = (own.vocab_size, hidden)
        found |= {name: shape for name, shape in shapes.items() if name.startswith(LAYER)}
        found[NORM] = (hidden,)
        for own_name in (self.embedding, self.head):
            if own_name is not None:
                found[own_name] = (own.vocab_size, hidden)
        found[f"{names.embedding_norm}.weight"] = found[f"{names.hidden_norm}.weight"] = (hidden,)
        found[f"{names.projection}.weight"] = (hidden, 2 * hidden)
        if names.before_norm:
            found[TARGET_NORM] = (hidden,)
        return found

    def _renamed(self, name: str) -> str:
        names, prefix = self._names, self._prefix
        if name == TARGET_NORM:
            return NORM
        if name == NORM:
            return f"{prefix}{names.norm}.weight"
        if name.startswith(LAYER):
            inner = name.removeprefix(LAYER)
            for usual, stored in names.renamed:
                inner = inner.replace(usual, stored)
            return self._layer + inner
        inside = (names.embedding_norm, names.hidden_norm, names.projection, names.head)
        if name.removesuffix(".weight") in (*inside, names.embedding):
            return prefix + name
        return name

    def _if_stored(
        self, name: str | None, shared: str, stored: Mapping[str, TensorInfo]
    ) -> str | None:
        """The tensor's name within the layer; None if it is absent or equals the shared one. On the
        meta device, which has no values, none are equal."""
        if name is None:
            return None
        name = f"{name}.weight"
        if self.locate(name).stored not in stored:
            return None
        reader = self._source.reader(self.locate, self._config)
        shape = (self._config.vocab_size, self._config.hidden_size)
        reader.check({name: shape, shared: shape}, ignored=("model.", HEAD))
        valued = reader.device.type != "meta"
        return None if valued and torch.equal(reader.view(name), reader.view(shared)) else name
