"""A GGUF file's tensors, memory-mapped, under the names that published checkpoints have.

llama.cpp's names are translated, the experts of a layer, which are one tensor there, are given one
by one, and the rows of Llama's queries and keys are put back into their published order.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import torch

from headrace_common.text.errors import TokenizerError
from headrace_common.text.gguf.config import ROPE_FACTORS
from headrace_common.text.gguf.files import read_gguf_configs
from headrace_common.text.gguf.header import StoredTensor

from ..core.errors import CheckpointError
from .loading import FileRange
from .tensor_info import Shape, TensorInfo

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Elements and bytes of a block of a quantised row, and the types that are supported.
BLOCKS: Mapping[str, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}
_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_MIXTRAL = {
    "mlp.experts": "block_sparse_moe.experts",
    "mlp.gate": "block_sparse_moe.gate",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)$")
_ROTATED = re.compile(r"\.self_attn\.([qk])_proj\.")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor's bytes are. Its rows are those of `heads` heads with the halves of each head
    interleaved; 0: in published order."""

    start: int
    stop: int
    heads: int = 0


class GGUFTensors:
    """The tensors by their published names. Raises CheckpointError for a file that is broken."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            header, config, _ = read_gguf_configs(path)
        except TokenizerError as error:
            raise CheckpointError(str(error)) from error
        self._architecture: str = config["architectures"][0]
        self._heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        self._size = path.stat().st_size
        self._places: dict[str, _Place] = {}
        self._infos: dict[str, TensorInfo] = {}
        for name, stored in header.tensors.items():
            if name != ROPE_FACTORS:  # config.json has them
                self._add(name, stored)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def ranges(self, names: Iterable[str]) -> Mapping[str, FileRange]:
        places = {name: self._places[name] for name in names}
        return {
            name: FileRange(self._path, place.start, place.stop) for name, place in places.items()
        }

    def load(self, name: str) -> torch.Tensor:
        info, place = self._infos[name], self._places[name]
        content = self._content[place.start : place.stop]
        if info.dtype in FLOATS:
            tensor = content.view(FLOATS[info.dtype]).view(info.shape)
        else:
            tensor = content.view(prod(info.shape[:-1]), -1)
        return _published_order(tensor, place.heads) if place.heads else tensor

    @cached_property
    def _content(self) -> torch.Tensor:
        return torch.from_file(str(self._path), size=self._size, dtype=torch.uint8)

    def _add(self, name: str, stored: StoredTensor) -> None:
        layer = _LAYER.match(name)
        if layer is not None and layer[2] in _EXPERTS and layer[3] == "weight":
            count, part = stored.shape[0], stored.shape[1:]
            length = self._length(name, stored) // count
            for index in range(count):
                own = f"model.layers.{layer[1]}.mlp.experts.{index}.{_EXPERTS[layer[2]]}.weight"
                start = stored.start + index * length
                self._put(own, part, stored.type, _Place(start, start + length))
            return
        published, length = _published(name), self._length(name, stored)
        shape = stored.shape
        if published.endswith("shared_expert_gate.weight") and len(shape) == 1:
            shape = (1, *shape)
        place = _Place(stored.start, stored.start + length, self._interleaved(published))
        self._put(published, shape, stored.type, place)

    def _put(self, name: str, shape: Shape, dtype: str, place: _Place) -> None:
        if self._architecture == "MixtralForCausalLM":
            for usual, other in _MIXTRAL.items():
                name = name.replace(usual, other)
        self._places[name], self._infos[name] = place, TensorInfo(self._path, shape, dtype)

    def _length(self, name: str, stored: StoredTensor) -> int:
        """Bytes of a tensor, which must be in the file."""
        elements = prod(stored.shape)
        if stored.type in FLOATS:
            length = elements * FLOATS[stored.type].itemsize
        elif stored.type in BLOCKS:
            block, size = BLOCKS[stored.type]
            if stored.shape[-1] % block:
                raise CheckpointError(
                    f"{self._path}: {name} has rows of {stored.shape[-1]} elements, and blocks of "
                    f"{stored.type} have {block}"
                )
            length = elements // block * size
        else:
            raise CheckpointError(unsupported(self._path, stored.type, name))
        if stored.start % 8:
            raise CheckpointError(f"{self._path}: {name} is not at a multiple of 8 bytes")
        if stored.start + length > self._size:
            raise CheckpointError(f"{self._path} is cut short: it ends within {name}")
        return length

    def _interleaved(self, published: str) -> int:
        """The number of heads of a matrix or bias whose rows llama.cpp's converter has moved."""
        if self._architecture not in ("LlamaForCausalLM", "MixtralForCausalLM"):
            return 0
        found = _ROTATED.search(published)
        return 0 if found is None else self._heads[found[1]]


def unsupported(path: Path, kind: str, what: str) -> str:
    """The message for tensors of a type that is not supported."""
    types = ", ".join((*FLOATS, *BLOCKS))
    return (
        f"{path}: {what} has the type {kind}, which is not supported: take a file with tensors of "
        f"{types} alone"
    )


def _published(name: str) -> str:
    """The published name of a tensor; its own if it is unknown, which the model then refuses."""
    layer = _LAYER.match(name)
    if layer is not None and layer[2] in _IN_LAYERS:
        return f"model.layers.{layer[1]}.{_IN_LAYERS[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_OUTSIDE[stem]}.{kind}" if stem in _OUTSIDE else name


def _published_order(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Puts the first halves of all pairs of a head before the second ones."""
    rows = tensor.view(heads, -1, 2, *tensor.shape[1:])
    return rows.transpose(1, 2).reshape(tensor.shape)
