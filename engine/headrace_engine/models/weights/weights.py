"""Reads a checkpoint's weights, converted to one dtype, under the names that Llama gives them.

Headers are compared with the model's expectations before anything is read, so that a wrong
checkpoint fails at once, with file and tensor. Quantised weights are converted to floats, or kept
for layers that compute with them.
"""

import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from functools import cache
from pathlib import Path

import torch

from ...checkpoints.loading import LoadProgress
from ...checkpoints.tensor_files import (
    INDEX_FILE,
    SINGLE_FILE,
    WHOLE,
    Portion,
    Shape,
    TensorFiles,
    TensorHeaders,
    TensorInfo,
    scan,
)
from ...core.errors import CheckpointError
from ...layers.float8_weight import Float8Weight
from ...layers.float8_weight import stack as stack_float8
from ...layers.gguf_weight import GGUFWeight
from ...layers.mxfp4_weight import MXFP4Weight
from ...layers.mxfp4_weight import stack as stack_mxfp4
from ...layers.quantized_weight import QuantizedWeight, stack
from ..layout import Piece, plain_layout
from ..parallel import Cuts, Stored
from ..quantization.base import QuantizedFormat, StoredWeight, TensorSpec

__all__ = ["INDEX_FILE", "SINGLE_FILE", "Shape", "WeightReader", "scan", "stored_dtype"]

MAX_LISTED_NAMES = 5
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
EMBEDDING = "model.embed_tokens.weight"
# Stored tensors that have no effect while activations and KV are unquantised.
HARMLESS = (
    ".inv_freq",
    ".input_scale",
    ".activation_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".weight_shape",
)
_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class WeightReader:
    """Reads tensors as `dtype` onto `device`. Raises CheckpointError for anything wrong.

    On the meta device, only headers are read.

    `locate` gives the stored name and rows of a tensor; `quantized` is the format of quantised
    matrices; `cuts` gives this rank's part of a tensor; `tensors` are the stored tensors, if they
    are known.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        locate: Callable[[str], Piece] = plain_layout,
        progress: LoadProgress | None = None,
        quantized: QuantizedFormat | None = None,
        cuts: Cuts | None = None,
        tensors: Mapping[str, TensorInfo] | None = None,
    ) -> None:
        self.dtype, self.device = dtype, device
        self._locate: Callable[[str], Piece] = cache(locate)
        self._format, self._cuts = quantized, cuts
        kind = TensorHeaders if device.type == "meta" else TensorFiles
        self._files = kind(folder, progress, tensors)
        self._shapes: dict[str, Shape] = {}  # of stored tensors
        self._expected: Mapping[str, Shape] = {}
        # The last unpacked matrix, for its further parts: they are requested one after the other.
        self._unpacked: tuple[str, StoredWeight] | None = None
        # The first quantised matrix of each kind, on the meta device.
        self._first: dict[tuple[str, ...], str] = {}

    def check(self, expected: Mapping[str, Shape], ignored: Collection[str] = ()) -> None:
        """Compares the files' headers with the expected names and shapes.

        The tensors must later be read in the order of `expected`. Tensors in `ignored` may exist
        and are not read; names in it that end in a dot are prefixes.
        """
        self._expected = expected
        for name, shape in expected.items():
            piece = self._locate(name)
            self._shapes[piece.stored] = piece.whole_shape(shape)
        wanted: dict[str, TensorSpec] = {}
        for stored, shape in self._shapes.items():
            wanted |= self._specs(stored, shape)
        tensors = self._files.tensors
        missing = [name for name in wanted if name not in tensors]
        if missing:
            raise CheckpointError(f"{self._files.folder}: missing tensors: {_listed(missing)}")
        for name, spec in wanted.items():
            _check_tensor(name, spec, tensors[name])
        self._check_unexpected(wanted, [self._locate(name).stored for name in ignored])
        if self.device.type != "meta":
            self._plan()

    def _plan(self) -> None:
        """Plans to read what this rank needs: of experts in one tensor only its own ones."""
        own: dict[str, Portion] = {}
        for name in self._expected:
            if self._cuts is None or self._cuts.reads(name):
                piece = self._locate(name)
                portion = piece.portion
                if self._cuts is not None and portion is WHOLE:
                    portion = self._cuts.portion(name, self._expected[name])
                own[piece.stored] = portion.joined(own.get(piece.stored, portion))
        self._files.plan(
            {
                tensor: portion
                for stored, portion in own.items()
                for tensor in self._specs(stored, self._shapes[stored])
            }
        )

    def _specs(self, stored: str, shape: Shape) -> Mapping[str, TensorSpec]:
        if self._format is not None and self._is_quantized(stored):
            if len(shape) != 2 and self._format.name in ("awq", "fp8", "gptq"):
                raise CheckpointError(
                    f"{self._files.folder}: {stored} has all experts in one tensor quantised with "
                    f"{self._format.name}: use compressed-tensors, or a tensor for each expert"
                )
            return self._format.tensors(stored.removesuffix(".weight"), shape, self._files)
        return {stored: TensorSpec((shape,), tuple(_FLOATS))}

    def _is_quantized(self, stored: str) -> bool:
        if self._format is None:
            return False
        return self._format.stores(stored.removesuffix(".weight"), self._files)

    def _check_unexpected(self, wanted: Collection[str], ignored: Collection[str]) -> None:
        tensors = self._files.tensors
        # The other parts of a multimodal model lie beside its decoder and are not read.
        stored = self._locate(EMBEDDING).stored
        part = stored.removesuffix(EMBEDDING) if stored.endswith(EMBEDDING) else ""
        prefixes = tuple(name for name in ignored if name.endswith("."))
        extra = [
            name
            for name in tensors
            if name not in wanted
            and name.startswith(part)
            and name not in ignored
            and not name.startswith(prefixes)
            and not name.endswith(HARMLESS)
            and not self._is_empty_bias(name)
        ]
        if extra:
            raise CheckpointError(
                f"{tensors[extra[0]].file}: tensors that the model has no place for: "
                f"{_listed(extra)}"
            )

    def _is_empty_bias(self, name: str) -> bool:
        """Some quantisers store a bias of zeros for layers that have none in the model."""
        if not name.endswith(".bias") or not self._is_quantized(f"{name[:-5]}.weight"):
            return False
        bias = self._files.load(name)
        return bias.is_meta or not bool(bias.any())

    def expects(self, name: str) -> bool:
        """Whether a tensor was given to `check`."""
        return name in self._expected

    def shape(self, name: str) -> Shape:
        """The shape of this rank's part of a tensor given to `check`."""
        whole = self.whole_shape(name)
        return whole if self._cuts is None else self._cuts.shape(name, whole)

    def whole_shape(self, name: str) -> Shape:
        """The shape, over all ranks, of a tensor given to `check`."""
        return self._expected[name]

    def read(self, name: str) -> torch.Tensor:
        return self.stack((name,))

    def read_float32(self, name: str) -> torch.Tensor:
        """A tensor in float32, since its values need more precision than the model's dtype has."""
        part = self._part(name, torch.float32)
        return part.to(device=self.device, dtype=torch.float32, copy=True)

    def view(self, name: str) -> torch.Tensor:
        """A tensor for reading only: pages of the mapped file if no conversion is needed."""
        return self._part(name).to(device=self.device, dtype=self.dtype).contiguous()

    def stack(self, names: Iterable[str]) -> torch.Tensor:
        """The named tensors concatenated in dimension 0, in new memory."""
        names = tuple(names)
        if self._needs_shapes_alone(names):
            shapes = [self.shape(name) for name in names]
            return self._made((sum(shape[0] for shape in shapes), *shapes[0][1:]), self.dtype)
        parts = [self._part(name) for name in names]
        rows = sum(part.shape[0] for part in parts)
        out = torch.empty((rows, *parts[0].shape[1:]), dtype=self.dtype, device=self.device)
        start = 0
        for part in parts:
            out[start : start + part.shape[0]].copy_(part)
            start += part.shape[0]
        return out

    def quantized(self, names: Iterable[str]) -> QuantizedWeight | None:
        """The named matrices stacked, as integers; None unless all are stored as integers or
        MXFP4."""
        parts = self._stored(names, QuantizedWeight)
        return None if parts is None else stack(parts)

    def mxfp4(self, names: Iterable[str]) -> MXFP4Weight | None:
        """Like `quantized`, for matrices in MXFP4."""
        parts = self._stored(names, MXFP4Weight)
        return None if parts is None else stack_mxfp4(parts)

    def float8(self, names: Iterable[str]) -> Float8Weight | None:
        """Like `quantized`, for matrices in 8-bit floats."""
        parts = self._stored(names, Float8Weight)
        return None if parts is None else stack_float8(parts)

    def blocks(
        self, names: Iterable[str], kinds: Container[str]
    ) -> list[GGUFWeight | torch.Tensor] | None:
        """The named matrices for reading only: in their blocks if their types in a GGUF file are
        among `kinds`, else as `view` gives them. None if no type is, or if ranks share matrices."""
        pieces = {name: self._locate(name) for name in names}
        stored = {name: self._files.tensors.get(piece.stored) for name, piece in pieces.items()}
        kept = {name for name, info in stored.items() if info is not None and info.dtype in kinds}
        if self._cuts is not None or not kept:
            return None
        found: list[GGUFWeight | torch.Tensor] = []
        for name, piece in pieces.items():
            weight = self._unpack(piece) if name in kept else self.view(name)
            assert isinstance(weight, GGUFWeight | torch.Tensor), "only GGUF files have blocks"
            found.append(weight)
        return found

    def _stored(self, names: Iterable[str], kind: type[Stored]) -> list[Stored] | None:
        """This rank's parts of the named matrices as stored; None if one is of another kind."""
        names = tuple(names)
        if self._needs_shapes_alone(names):
            return None
        parts: list[Stored] = []
        for name in names:
            piece = self._locate(name)
            if not self._is_quantized(piece.stored):
                return None
            weight = self._unpack(piece)
            if isinstance(weight, MXFP4Weight) and kind is QuantizedWeight:
                weight = weight.quantized()
            if not isinstance(weight, kind):
                if piece.rows is None:
                    self._unpacked = piece.stored, weight  # as another kind, it is requested next
                return None
            parts.append(weight if self._cuts is None else self._cuts.quantized(name, weight))
        return parts

    def _part(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's part; reads only its own pages of unquantised tensors. `dtype` is the one
        that it will have, if that is not the reader's."""
        if self._needs_shapes_alone((name,)):
            return self._made(self.shape(name), dtype or self.dtype)
        whole = self._load(name, dtype or self.dtype)
        return whole if self._cuts is None else self._cuts.tensor(name, whole)

    def _load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        piece = self._locate(name)
        if not self._is_quantized(piece.stored):
            return piece.of(self._files.load(piece.stored))
        weight = self._unpack(piece)
        shape = self._shapes[piece.stored] if piece.rows is None else weight.shape
        if self.device.type == "meta":
            return torch.empty(shape, device=self.device)
        if isinstance(weight, GGUFWeight):  # only a part is in memory as float32
            return weight.dequantize(dtype)
        return weight.dequantize().view(shape)

    def _needs_shapes_alone(self, names: tuple[str, ...]) -> bool:
        """Whether tensors are made without what is stored: on the meta device only cuts, which must
        lie between groups of quantised matrices, depend on more than the shapes that `check` has
        compared. One matrix of each kind is cut."""
        if self.device.type != "meta":
            return False
        return self._cuts is None or not any([self._is_cut(name) for name in names])

    def _is_cut(self, name: str) -> bool:
        """Whether a matrix is quantised, and the first of those with its stored shapes whose names
        differ only in numbers of layers and experts."""
        stored = self._locate(name).stored
        if not self._is_quantized(stored):
            return False
        shapes = [
            str(self._files.tensors[tensor].shape)
            for tensor in self._specs(stored, self._shapes[stored])
        ]
        kind = (_NUMBER.sub("", name), *shapes)
        return self._first.setdefault(kind, name) == name

    def _made(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _unpack(self, piece: Piece) -> StoredWeight:
        """The rows of a piece, from its unpacked matrix."""
        assert self._format is not None, "only quantised matrices are unpacked"
        stored = piece.stored
        if self._unpacked is None or self._unpacked[0] != stored:
            module = stored.removesuffix(".weight")
            weight = self._format.read(module, self._shapes[stored], self._files)
            self._unpacked = stored, weight
        weight = self._unpacked[1]
        if piece.rows is None or piece.stop == piece.rows:
            self._unpacked = None  # no further part of it will be requested
        return weight if piece.rows is None else weight.rows(piece.start, piece.stop, piece.step)


def stored_dtype(folder: Path) -> torch.dtype:
    """The float dtype of most of a checkpoint's tensors."""
    names = [info.dtype for info in scan(folder).values() if info.dtype in _FLOATS]
    if not names:
        raise CheckpointError(f"{folder}: the safetensors files hold no float tensors")
    return _FLOATS[max(sorted(set(names)), key=names.count)]


def _check_tensor(name: str, spec: TensorSpec, found: TensorInfo) -> None:
    if found.shape not in spec.shapes:
        wanted = " or ".join(str(list(shape)) for shape in spec.shapes)
        raise CheckpointError(
            f"{found.file}: {name} has shape {list(found.shape)}, but config.json asks for {wanted}"
        )
    if found.dtype not in spec.dtypes:
        raise CheckpointError(
            f"{found.file}: {name} has unsupported dtype {found.dtype}: the model takes "
            f"{', '.join(spec.dtypes)}"
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_LISTED_NAMES])
    more = len(names) - MAX_LISTED_NAMES
    return shown if more <= 0 else f"{shown} and {more} more"
