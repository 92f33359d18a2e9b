"""Prints as JSON how an engine would serve a checkpoint, without its weights:

    python -m headrace_engine.model_loader.describe_model FOLDER_OR_GGUF [RANKS]

`problem` is the reason why no engine serves it, else null. Whether a model without a native
implementation is served at all is known only once transformers has loaded it.
"""

import json
import sys
from dataclasses import asdict, dataclass, replace

import torch

from ..checkpoints.architectures import RECURRENT
from ..checkpoints.checkpoint import Checkpoint, load_checkpoint
from ..checkpoints.config import ModelConfig
from ..checkpoints.tensor_files import has_files, scan
from ..core.errors import ConfigError, EngineError
from ..models.context import pick_context
from ..models.draft_heads.base import HeadOptions
from ..models.draft_heads.mtp import FAMILIES
from ..models.encoder.encoder_families import encoder_family
from ..models.hybrid.family import Family
from ..models.hybrid.hybrid import HEAD_PROJECTION, read_family
from ..models.parallel import check_divisible
from ..models.quantization.registry import find_format
from ..models.registry import NATIVE, check_code
from .loader import pick_device, pick_dtype
from .meta import load_on_meta


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """How an engine with default settings on this machine would serve a checkpoint.

    `implementation` is native, transformers, or encoder (embeddings alone). The bytes of KV and of
    recurrent states are known for native models. `tensors` is the number of stored tensors if each
    was found to have its place in the model, with the shape that config.json asks for.
    """

    architecture: str
    implementation: str
    device: str
    dtype: str
    quantization: str | None = None
    max_model_len: int | None = None
    kv_bytes_per_token: int | None = None
    state_bytes_per_sequence: int = 0
    tensors: int | None = None
    note: str = ""


def describe(checkpoint: Checkpoint, ranks: int = 1) -> Description:
    """Describes a checkpoint whose engine has as many ranks.

    A native model is made on the meta device from the headers of the checkpoint's files, if it has
    files. Raises ConfigError or CheckpointError, which name what cannot be served.
    """
    check_code(checkpoint)
    device = pick_device("auto")
    dtype = pick_dtype("auto", checkpoint, device)
    quantized = find_format(checkpoint, "none", device) is not None
    encodes = encoder_family(checkpoint) is not None
    found = Description(
        architecture=checkpoint.architecture,
        implementation="encoder" if encodes else "transformers",
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        quantization=checkpoint.quantization_config["quant_method"] if quantized else None,
    )
    if checkpoint.architecture not in NATIVE:
        return found
    if checkpoint.architecture in RECURRENT:
        family = read_family(checkpoint)
        head = HEAD_PROJECTION if family.has_head else None
        return replace(
            _with_state(found, family, dtype),
            tensors=_check_tensors(checkpoint, dtype, ranks, head),
        )
    try:
        config = ModelConfig.from_hf(checkpoint)
    except ConfigError as error:
        if quantized or checkpoint.is_gguf:
            raise
        return replace(found, note=str(error))
    if ranks > 1:
        check_divisible(config, ranks)
    rope, positions = config.rope, config.max_position_embeddings
    names = FAMILIES.get(checkpoint.architecture) if config.draft_layers else None
    head = None if names is None else names.projection_of(config.num_layers)
    return replace(
        found,
        implementation="native",
        max_model_len=pick_context(None, positions, rope.rope_type, rope.parameters),
        kv_bytes_per_token=_kv_bytes(config, dtype),
        tensors=_check_tensors(checkpoint, dtype, ranks, head),
    )


def _check_tensors(
    checkpoint: Checkpoint, dtype: torch.dtype, ranks: int, head: str | None
) -> int | None:
    """The number of tensors, each with its place; None without files, or for a GGUF file, whose
    tensors are compared when they are read. The tensors of an MTP head are compared if there is
    one, which the tensor `head` tells. Raises ConfigError or CheckpointError."""
    if checkpoint.is_gguf or not has_files(checkpoint.folder):
        return None
    tensors = scan(checkpoint.folder)
    options = HeadOptions("mtp") if head in tensors else None
    load_on_meta(checkpoint, dtype, tensors, ranks, options)
    return len(tensors)


def _with_state(found: Description, family: Family, dtype: torch.dtype) -> Description:
    shape = family.shape(dtype)
    stored = () if shape.without_kv else shape.kv_shapes
    kv = sum((1 if each.latent else 2) * each.num_kv_heads * each.head_dim for each in stored)
    state = shape.num_state_layers * sum(tensor.num_bytes for tensor in shape.state_tensors)
    return replace(
        found,
        implementation="native",
        max_model_len=family.context(None),
        kv_bytes_per_token=kv * dtype.itemsize,
        state_bytes_per_sequence=state,
    )


def _kv_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """KV bytes of a token in all layers; layers with a window keep only the last tokens."""
    layers = range(config.num_layers)
    return sum(config.cached_elements(layer) for layer in layers) * dtype.itemsize


def main(folder: str, ranks: int = 1) -> None:
    try:
        found = {**asdict(describe(load_checkpoint(folder), ranks)), "problem": None}
    except EngineError as error:
        found = {"problem": str(error)}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1)
