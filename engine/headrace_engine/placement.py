"""A checkpoint loaded onto its device, with the attention backend and operators it computes with.

Decides where and how; runs nothing.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from . import attention
from .attention.base import AttentionBackend, KVSpec, LayerCache
from .attention.fp8 import CACHE_DTYPES
from .config import EngineConfig
from .errors import ConfigError
from .kernels.ops import make_ops
from .kv_budget import Profile, count_blocks
from .kv_groups import KVLayout
from .lora.adapter import AdapterWeights
from .lora.batch import OwnLoRA
from .lora.shapes import AdaptableModel, LayerShapes
from .model.base import CausalModel
from .model.checkpoint import Checkpoint, load_checkpoint
from .model.encoder_families import encoder_family
from .model.hidden_states import causal
from .model.ops import Ops, TorchOps
from .model.parallel import Shard
from .model.registry import LoadedModel, Placement, load_model
from .model.weights import stored_dtype
from .pooler_config import (
    PoolerConfig,
    check_overrides,
    is_embedding_model,
    read_pooler_config,
)

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class PeerRanks(Protocol):
    """The other ranks of a model that several processes share: they do what this one does."""

    def allocate(self, num_blocks: int) -> None: ...

    def reserve_host(self, num_blocks: int) -> None:
        """KV blocks in host memory."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None: ...

    def swap(
        self, swap_out: Sequence[tuple[int, int]], swap_in: Sequence[tuple[int, int]]
    ) -> None: ...

    def make_room(self, experts: bool) -> None:
        """For adapters; also for those that change the experts of mixtures, or not."""

    def put_adapter(
        self, slot: int, shapes: Sequence[LayerShapes], weights: AdapterWeights
    ) -> None:
        """Writes what each one holds of an adapter into a slot of its own."""

    def smallest(
        self,
        count: Callable[[Profile], int],
        profile: Profile,
        max_model_len: int,
    ) -> int:
        """The least of what `count(profile)` gives on any rank."""

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """Calls it, from any thread, when a rank fails."""

    def close(self) -> None:
        """Ends them."""


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """`layout` is that of the KV cache. `peers` have the other parts of the model; None: it is all
    here. `cache_dtype` is what KV is kept in; None: `dtype`. `lora_shapes` is what adapters may
    change; None: nothing."""

    model: CausalModel
    attention: AttentionBackend
    ops: Ops
    device: torch.device
    dtype: torch.dtype
    eos_token_ids: frozenset[int]
    max_model_len: int
    layout: KVLayout
    pooler_config: PoolerConfig | None = None
    peers: PeerRanks | None = None
    cache_dtype: torch.dtype | None = None
    lora_shapes: tuple[LayerShapes, ...] | None = None

    def allocate(self, num_blocks: int, block_size: int) -> tuple[LayerCache, ...]:
        """Zeroed KV memory, one entry a layer, of which those of one place are the same."""
        if self.peers is not None:
            self.peers.allocate(num_blocks)
        specs = self._specs(block_size)
        memory = [self.attention.allocate(num_blocks, spec) for spec in specs]
        return tuple(memory[place] for place in self.layout.places)

    def block_bytes(self, block_size: int) -> int:
        """Bytes that one block takes in all layers of a group together."""
        return sum(self.attention.block_bytes(spec) for spec in self._specs(block_size))

    def sequence_blocks(self, block_size: int, max_model_len: int) -> int:
        """How many the longest sequence takes, nothing of it given back."""
        return -(-max_model_len // block_size) * self.layout.groups.count

    def copy_blocks(
        self, caches: tuple[LayerCache, ...], copies: tuple[tuple[int, int], ...]
    ) -> None:
        """Copies whole (source, destination) blocks in all layers of their groups."""
        if self.peers is not None:
            self.peers.copy_blocks(copies)
        pairs = torch.from_numpy(np.array(copies, dtype=np.int64)).to(self.device)
        for layer in self.layout.of_places:
            self.attention.copy_blocks(caches[layer], pairs)

    def count_blocks(
        self,
        config: EngineConfig,
        bytes_per_block: int,
        max_model_len: int,
        profile: Profile,
    ) -> int:
        """How many KV blocks fit, on every rank. Raises ConfigError where none does."""

        def count(run: Profile) -> int:
            sequence = self.sequence_blocks(config.block_size, max_model_len)
            return count_blocks(config, self.device, bytes_per_block, sequence, run)

        if self.peers is None:
            return count(profile)
        blocks = self.peers.smallest(count, profile, max_model_len)
        if blocks < 1:
            raise ConfigError("a rank has no room for one KV block: its log says how much it needs")
        return blocks

    def _specs(self, block_size: int) -> list[KVSpec]:
        """Of each place."""
        shapes = self.model.kv_shapes
        return [
            KVSpec(
                shape.num_kv_heads,
                shape.head_dim,
                block_size,
                self.dtype,
                self.device,
                self.cache_dtype,
            )
            for shape in map(shapes.__getitem__, self.layout.of_places)
        ]


def place_model(config: EngineConfig, shard: Shard | None = None) -> PlacedModel:
    """All of the model, or the part that `shard` says, on the GPU that is this rank's.

    Raises CheckpointError or ConfigError naming what cannot be loaded or served.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    checkpoint = load_checkpoint(config.model, config.revision)
    pooler_config = _pooler_config(config, checkpoint)
    if pooler_config is not None and not pooler_config.bidirectional:
        checkpoint = causal(checkpoint)
    device = pick_device(config.device)
    if shard is not None and device.type == "cuda":
        device = torch.device("cuda", shard.rank)
        torch.cuda.set_device(device)
    dtype = pick_dtype(config.dtype, checkpoint, device)
    wanted, deterministic = config.attention_backend, config.deterministic
    stored = pick_cache_dtype(config.kv_cache_dtype)
    backend = attention.select(wanted, device, dtype, config.block_size, deterministic, stored)
    # The reference is plain torch throughout, native kernels included in all else.
    ops = TorchOps() if backend.name == "reference" else make_ops(device, deterministic)
    _check_adapters(config, ops)
    placement = Placement(
        device,
        dtype,
        backend,
        ops,
        config.max_model_len,
        config.quantization,
        hidden_states=pooler_config is not None,
        shard=shard,
        deterministic=deterministic,
        load_format=config.load_format,
        cache_dtype=stored,
    )
    with torch.inference_mode():
        loaded = load_model(config, checkpoint, placement)
    placed = PlacedModel(
        model=loaded.model,
        attention=backend,
        ops=ops,
        device=device,
        dtype=dtype,
        eos_token_ids=frozenset(checkpoint.eos_token_ids),
        max_model_len=loaded.max_model_len,
        layout=_layout(config, loaded),
        pooler_config=pooler_config,
        cache_dtype=stored,
        lora_shapes=_lora_shapes(config, loaded.model),
    )
    if _is_tuned(config, placed):
        from .tuning.start import tune  # needs Triton

        tune(placed, config)
    return placed


def _layout(config: EngineConfig, loaded: LoadedModel) -> KVLayout:
    """Layers that keep different positions get blocks of their own, if these are of one size."""
    shapes = loaded.model.kv_shapes
    windows = loaded.windows or (None,) * len(shapes)
    hybrid = KVLayout.of(windows, hybrid=len(set(shapes)) == 1)
    if hybrid.groups.count > 1 and config.disable_hybrid_kv_cache_manager:
        logger.info("layers share block tables: those with a window keep all KV, too")
        return KVLayout.of(windows, hybrid=False)
    return hybrid


def _is_tuned(config: EngineConfig, placed: PlacedModel) -> bool:
    wanted = config.enable_autotuner and not config.enforce_eager and not config.deterministic
    return wanted and placed.device.type == "cuda" and not isinstance(placed.ops, TorchOps)


def _check_adapters(config: EngineConfig, ops: Ops) -> None:
    if config.enable_lora and config.deterministic and not isinstance(ops, OwnLoRA):
        raise ConfigError(
            "enable_lora and deterministic go together with Triton's kernels on GPUs only: leave "
            "one out"
        )


def _lora_shapes(config: EngineConfig, model: CausalModel) -> tuple[LayerShapes, ...] | None:
    if isinstance(model, AdaptableModel):
        return model.lora_shapes
    if config.enable_lora:
        raise ConfigError(
            "enable_lora needs the native implementation of a model that makes text: see "
            "model_implementation and docs/lora.md"
        )
    return None


def _pooler_config(config: EngineConfig, checkpoint: Checkpoint) -> PoolerConfig | None:
    check_overrides(config.pooler_config)
    embeds = config.task == "embed"
    if config.task == "auto":
        embeds = is_embedding_model(checkpoint)
    if not embeds:
        _check_writes(checkpoint)
        return None
    found = read_pooler_config(checkpoint, config.pooler_config)
    if found.bidirectional and config.swap_space:
        raise ConfigError(
            f"swap_space is {config.swap_space}, but {checkpoint.architecture} keeps no KV that "
            "could be swapped: leave it out"
        )
    if found.bidirectional and config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype}, but {checkpoint.architecture} keeps no "
            "KV: leave it out"
        )
    return found


def _check_writes(checkpoint: Checkpoint) -> None:
    if encoder_family(checkpoint) is not None:
        raise ConfigError(
            f"{checkpoint.folder}: {checkpoint.architecture} is an encoder, which writes no text: "
            "set task embed, if it was trained to embed"
        )


def pick_device(name: str) -> torch.device:
    """The device of a setting; `auto` is the first GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known to torch: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, not {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but torch finds no CUDA device")
    return device


def pick_dtype(name: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """The dtype of a setting; `auto` is the checkpoint's, by config.json or by its tensors.

    On CPUs, whose kernels have no float16, such a checkpoint is computed in bfloat16.
    """
    if name != "auto":
        return _named_dtype(name)
    stated = checkpoint.dtype_name
    found = stored_dtype(checkpoint.folder) if stated is None else _named_dtype(stated)
    if found is torch.float16 and device.type == "cpu":
        logger.info("bfloat16 is used in place of float16, which CPUs compute slowly")
        return torch.bfloat16
    return torch.float32 if found is torch.float64 else found


def pick_cache_dtype(name: str) -> torch.dtype | None:
    """What KV is kept in; None: the model's dtype."""
    if name not in CACHE_DTYPES:
        raise ConfigError(f"kv_cache_dtype must be one of {', '.join(CACHE_DTYPES)}, not {name!r}")
    return CACHE_DTYPES[name]


def _named_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPES)}, not {name!r}")
    return DTYPES[name]
