"""Attention backends by name. A backend's module is imported only when it is chosen."""

import importlib
import logging

import torch

from ..errors import ConfigError
from .base import AttentionBackend

logger = logging.getLogger(__name__)

# Name -> module and class; the class is made without arguments, or refuses with ConfigError.
BACKENDS: dict[str, tuple[str, str]] = {
    "reference": ("headrace_engine.attention.reference", "ReferenceBackend"),
    "cpu": ("headrace_engine.attention.cpu", "CpuBackend"),
    "flash": ("headrace_engine.attention.flash", "FlashBackend"),
}
PREFERRED = {"cpu": "cpu", "cuda": "flash"}


def select(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The backend called `name`; `auto` takes the fastest that works here and logs why.

    Raises ConfigError for an unknown name, or where the named backend cannot run on the device.
    """
    if name == "auto":
        return _automatic(device, dtype)
    if name not in BACKENDS:
        raise ConfigError(
            f"attention_backend must be one of auto, {', '.join(BACKENDS)}, not {name!r}"
        )
    return _make(name, device, dtype)


def _automatic(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    preferred = PREFERRED.get(device.type, "reference")
    try:
        backend = _make(preferred, device, dtype)
    except ConfigError as error:
        logger.warning(
            "attention backend chosen", extra={"backend": "reference", "reason": str(error)}
        )
        return _make("reference", device, dtype)
    reason = f"fastest for {device.type}"
    logger.info("attention backend chosen", extra={"backend": preferred, "reason": reason})
    return backend


def _make(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    wanted = {"cpu": "cpu", "flash": "cuda"}.get(name, device.type)
    if device.type != wanted:
        raise ConfigError(f"attention_backend {name} needs a {wanted} device, not {device.type}")
    module, attribute = BACKENDS[name]
    try:
        backend: AttentionBackend = getattr(importlib.import_module(module), attribute)()
    except ImportError as error:
        raise ConfigError(f"attention_backend {name} cannot be loaded: {error}") from error
    if name == "flash" and dtype is torch.float32:
        raise ConfigError("attention_backend flash computes in bfloat16 or float16, not float32")
    return backend
