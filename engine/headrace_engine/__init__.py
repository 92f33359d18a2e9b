"""Headrace's inference engine. `LLM` and `SamplingParams` are all that offline users need."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace_common.sampling import SamplingParams as SamplingParams

    from .llm import LLM as LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Imports on first use: importing a small module of this package must not import torch."""
    if name == "LLM":
        from .llm import LLM

        return LLM
    if name == "SamplingParams":
        from headrace_common.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
