"""Errors of the hub's client that mean that the hub could not be asked."""

from importlib import import_module
from importlib.util import find_spec


def transport_errors() -> tuple[type[Exception], ...]:
    """The errors of the HTTP libraries that versions of huggingface-hub use."""
    found = (import_module(name) for name in ("httpx", "httpx2") if find_spec(name) is not None)
    return OSError, *(module.HTTPError for module in found)
