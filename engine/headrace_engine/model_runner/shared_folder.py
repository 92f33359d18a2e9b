"""The shared tier of a model runner: which KV of other engines it may read."""

import logging
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import torch

from ..checkpoints.checkpoint import load_checkpoint
from ..checkpoints.fingerprint import checkpoint_digest
from ..core.config import EngineConfig
from ..core.errors import ConfigError
from ..kv_cache.block_folder import BlockFolder
from ..kv_cache.memory_budget import GIB
from ..kv_cache.shared_kv_cache import SharedKVCache
from ..models.placed_model import PlacedModel
from .host_kv_cache import HostKVCache

logger = logging.getLogger(__name__)

# At most this share of the host's blocks waits to be written.
WRITING = 1 / 4


def share_kv_cache(
    config: EngineConfig, placed: PlacedModel, host: HostKVCache | None
) -> SharedKVCache | None:
    """Opens the configured folder; None if there is none. Raises ConfigError."""
    if config.kv_offloading_folder is None or host is None:
        return None
    size = int(config.kv_offloading_folder_size * GIB)
    folder = Path(config.kv_offloading_folder)
    if placed.layout.groups.window is not None:
        raise ConfigError(
            "kv_offloading_folder does not support models whose layers all have a sliding window: "
            "leave it out"
        )
    if size < host.bytes_per_block:
        raise ConfigError(
            f"kv_offloading_folder_size {config.kv_offloading_folder_size} GiB is less than one KV "
            f"block of {host.bytes_per_block} bytes: raise it"
        )
    try:
        fingerprint = kv_fingerprint(config, placed, host)
        store = BlockFolder(folder, fingerprint, size)
    except OSError as error:
        raise ConfigError(
            f"kv_offloading_folder {str(folder)!r} cannot be used: {error.strerror or error}"
        ) from error
    logger.info("KV is shared", extra={"folder": str(folder), "fingerprint": fingerprint.hex()})
    return SharedKVCache(
        store,
        host,
        host.bytes_per_block,
        most_writing=max(1, int(host.num_blocks * WRITING)),
        paced=placed.device.type == "cpu" and config.kv_offloading_paced,
    )


def kv_fingerprint(config: EngineConfig, placed: PlacedModel, host: HostKVCache) -> bytes:
    """What two engines must have in common to read the same bytes as the KV of the same tokens.

    GPUs and CPUs, and with `deterministic` different GPUs, round differently.
    """
    checkpoint = load_checkpoint(config.model, config.revision)
    if config.load_format == "dummy":
        raise ConfigError("load_format dummy has no KV to share: leave kv_offloading_folder out")
    device = placed.device.type
    if config.deterministic and device == "cuda":
        device = torch.cuda.get_device_name(placed.device)
    facts = (
        version("headrace"),  # another version may order the bytes of a block otherwise
        checkpoint_digest(checkpoint.folder),
        type(placed.model).__name__,
        config.quantization,
        placed.dtype,
        placed.cache_dtype,
        placed.attention.name,
        host.layout,
        config.block_size,
        # Some rotary embeddings are chosen by the longest context.
        placed.max_model_len,
        config.draft_head,
        config.deterministic,
        device,
    )
    return sha256(repr(facts).encode()).digest()[:16]
