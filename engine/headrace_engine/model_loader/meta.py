"""Makes a native model on the meta device: all its shapes, without memory for its weights."""

from collections.abc import Mapping

import torch

from ..attention.reference import ReferenceBackend
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.tensor_info import TensorInfo
from ..models.draft_heads.base import HeadOptions
from ..models.parallel import Shard
from ..models.registry import LoadedModel, LoadOptions, load_native
from ..operators.base import TorchOps


class _NoCollectives:
    """Stands for the other ranks of a model that is not run."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]


def load_on_meta(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    tensors: Mapping[str, TensorInfo],
    ranks: int = 1,
    head: HeadOptions | None = None,
) -> LoadedModel:
    """Loads the last rank's part of a native model, and its draft head, from `tensors`, the headers
    of its files.

    Raises ConfigError or CheckpointError for what cannot be loaded or divided among the ranks.
    """
    shard = None if ranks == 1 else Shard(ranks - 1, ranks, _NoCollectives())
    options = LoadOptions(
        torch.device("meta"),
        dtype,
        ReferenceBackend(),
        TorchOps(),
        positions=1,
        shard=shard,
        draft_head=head,
        tensors=tensors,
    )
    with torch.inference_mode():
        return load_native(checkpoint, options)
