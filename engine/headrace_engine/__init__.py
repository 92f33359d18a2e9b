"""Headrace's inference engine. `LLM` and `SamplingParams` are all that offline users need."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace_common.sampling.params import SamplingParams as SamplingParams
    from headrace_common.structured.structured import GuidedDecodingParams as GuidedDecodingParams
    from headrace_common.structured.structured import (
        StructuredOutputsParams as StructuredOutputsParams,
    )

    from .lora.request import LoRARequest as LoRARequest
    from .offline.beams import BeamSearchParams as BeamSearchParams
    from .offline.llm import LLM as LLM

__all__ = [
    "LLM",
    "BeamSearchParams",
    "GuidedDecodingParams",
    "LoRARequest",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    """Imports on first use: importing a small module of this package must not import torch."""
    if name == "LLM":
        from .offline.llm import LLM

        return LLM
    if name == "BeamSearchParams":
        from .offline.beams import BeamSearchParams

        return BeamSearchParams
    if name == "LoRARequest":
        from .lora.request import LoRARequest

        return LoRARequest
    if name == "SamplingParams":
        from headrace_common.sampling.params import SamplingParams

        return SamplingParams
    if name in ("GuidedDecodingParams", "StructuredOutputsParams"):
        from headrace_common.structured.structured import StructuredOutputsParams

        return StructuredOutputsParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
