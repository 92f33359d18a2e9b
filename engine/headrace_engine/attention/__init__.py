"""Attention backends behind one protocol (core's `attention_backend`), chosen by name.

Imports operators and the subpackages below it.
"""

import importlib
import logging

import torch

from ..core.attention_backend import (
    AttentionBackend,
    ReadsSomeBlocks,
    chunk_backend,
    latent_backend,
)
from ..core.errors import ConfigError
from ..layers.fp8_cache import is_fp8

logger = logging.getLogger(__name__)

# Name -> module and class. The class takes no arguments, or raises ConfigError.
BACKENDS: dict[str, tuple[str, str]] = {
    "reference": ("headrace_engine.attention.reference", "ReferenceBackend"),
    "cpu": ("headrace_engine.attention.cpu", "CpuBackend"),
    "flash": ("headrace_engine.attention.flash", "FlashBackend"),
    "triton": ("headrace_engine.attention.triton", "TritonBackend"),
}
DEVICES = {"cpu": "cpu", "flash": "cuda", "triton": "cuda"}
# For each device type, the backend whose sums do not depend on the rest of the batch.
DETERMINISTIC = {"cpu": "cpu", "cuda": "triton"}
# The backends of each device type, the fastest first; `reference` if none of them works.
PREFERRED: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("flash", "triton")}


def select(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int = 16,
    deterministic: bool = False,
    cache_dtype: torch.dtype | None = None,
    latents: bool = False,
    chunks: bool = False,
) -> AttentionBackend:
    """Returns the backend called `name`; `auto` takes the fastest that works here and logs why.

    A `deterministic` backend adds up a token's keys in the same order in every batch. `cache_dtype`
    is the dtype of stored KV; None means `dtype`. `latents` says that the model attends to latents,
    `chunks` that some layers attend in chunks.

    `auto` passes over a backend that cannot read blocks of `block_size` tokens in place. Raises
    ConfigError for an unknown name, or if the named backend cannot run on the device.
    """
    if deterministic:
        return _deterministic(name, device, dtype)
    if name == "auto":
        return _automatic(device, dtype, block_size, cache_dtype, latents, chunks)
    if name not in BACKENDS:
        raise ConfigError(
            f"attention_backend must be one of auto, {', '.join(BACKENDS)}, not {name!r}"
        )
    _check_cache(name, cache_dtype)
    return _checked(_make(name, device, dtype), latents, chunks)


def _checked(backend: AttentionBackend, latents: bool, chunks: bool) -> AttentionBackend:
    """Refuses a backend that cannot compute the model."""
    if latents:
        latent_backend(backend)
    return chunk_backend(backend) if chunks else backend


def _automatic(
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    cache_dtype: torch.dtype | None,
    latents: bool,
    chunks: bool,
) -> AttentionBackend:
    refused: list[str] = []
    for name in PREFERRED.get(device.type, ()):
        try:
            _check_cache(name, cache_dtype)
            backend = _checked(_make(name, device, dtype), latents, chunks)
            _check_blocks(backend, block_size)
        except ConfigError as error:
            refused.append(str(error))
            continue
        reason = "; ".join([f"fastest for {device.type}", *refused])
        logger.info("attention backend chosen", extra={"backend": name, "reason": reason})
        return backend
    reason = "; ".join(refused) or f"no other for a {device.type} device"
    logger.warning("attention backend chosen", extra={"backend": "reference", "reason": reason})
    return _make("reference", device, dtype)


def _deterministic(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    wanted = DETERMINISTIC[device.type]
    if name not in ("auto", wanted):
        raise ConfigError(
            f"deterministic needs attention_backend {wanted} on a {device.type} device, not "
            f"{name!r}"
        )
    return _make(wanted, device, dtype, **({"deterministic": True} if wanted == "triton" else {}))


def _check_cache(name: str, cache_dtype: torch.dtype | None) -> None:
    if name == "flash" and cache_dtype is not None and is_fp8(cache_dtype):
        raise ConfigError(
            "attention_backend flash reads no KV cache in fp8: use attention_backend triton, or "
            "kv_cache_dtype auto"
        )


def _check_blocks(backend: AttentionBackend, block_size: int) -> None:
    """Refuses a backend that would copy all keys and values before each layer."""
    if isinstance(backend, ReadsSomeBlocks) and not backend.reads_blocks(block_size):
        raise ConfigError(
            f"attention_backend {backend.name} cannot read blocks of {block_size} tokens in place"
        )


def _make(name: str, device: torch.device, dtype: torch.dtype, **options: bool) -> AttentionBackend:
    wanted = DEVICES.get(name, device.type)
    if device.type != wanted:
        raise ConfigError(f"attention_backend {name} needs a {wanted} device, not {device.type}")
    module, attribute = BACKENDS[name]
    try:
        backend: AttentionBackend = getattr(importlib.import_module(module), attribute)(**options)
    except ImportError as error:
        raise ConfigError(f"attention_backend {name} cannot be loaded: {error}") from error
    if name == "flash" and dtype is torch.float32:
        raise ConfigError("attention_backend flash computes in bfloat16 or float16, not float32")
    return backend
