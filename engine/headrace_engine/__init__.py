"""Headrace's inference engine. These names are all that offline users need."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# libgomp reads it when torch loads it. By default its threads spin for milliseconds at every
# barrier, which takes cores from the native kernels' threads, a gateway and Redis.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

if TYPE_CHECKING:
    from headrace_common.sampling.pooling import PoolingParams as PoolingParams
    from headrace_common.structured.structured import GuidedDecodingParams as GuidedDecodingParams
    from headrace_common.structured.structured import (
        StructuredOutputsParams as StructuredOutputsParams,
    )

    from .async_llm import AsyncLLM as AsyncLLM
    from .lora.request import LoRARequest as LoRARequest
    from .offline.beams import BeamSearchParams as BeamSearchParams
    from .offline.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from .offline.engine_args import EngineArgs as EngineArgs
    from .offline.engine_args import FlexibleArgumentParser as FlexibleArgumentParser
    from .offline.llm import LLM as LLM
    from .offline.llm_engine import LLMEngine as LLMEngine
    from .offline.memory import cleanup_dist_env_and_memory as cleanup_dist_env_and_memory
    from .offline.metrics import Counter as Counter
    from .offline.metrics import Gauge as Gauge
    from .offline.metrics import Histogram as Histogram
    from .offline.metrics import Vector as Vector
    from .offline.outputs import CompletionOutput as CompletionOutput
    from .offline.outputs import RequestOutput as RequestOutput
    from .offline.prompts import TextPrompt as TextPrompt
    from .offline.prompts import TokensPrompt as TokensPrompt
    from .offline.sampling_params import RequestOutputKind as RequestOutputKind
    from .offline.sampling_params import SamplingParams as SamplingParams

# The module of each name, in headrace_engine or headrace_common.
_MODULES = {
    "AsyncEngineArgs": ".offline.engine_args",
    "AsyncLLM": ".async_llm",
    "BeamSearchParams": ".offline.beams",
    "CompletionOutput": ".offline.outputs",
    "Counter": ".offline.metrics",
    "EngineArgs": ".offline.engine_args",
    "FlexibleArgumentParser": ".offline.engine_args",
    "Gauge": ".offline.metrics",
    "GuidedDecodingParams": "headrace_common.structured.structured",
    "Histogram": ".offline.metrics",
    "LLM": ".offline.llm",
    "LLMEngine": ".offline.llm_engine",
    "LoRARequest": ".lora.request",
    "PoolingParams": "headrace_common.sampling.pooling",
    "RequestOutput": ".offline.outputs",
    "RequestOutputKind": ".offline.sampling_params",
    "SamplingParams": ".offline.sampling_params",
    "StructuredOutputsParams": "headrace_common.structured.structured",
    "TextPrompt": ".offline.prompts",
    "TokensPrompt": ".offline.prompts",
    "Vector": ".offline.metrics",
    "cleanup_dist_env_and_memory": ".offline.memory",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "Counter",
    "EngineArgs",
    "FlexibleArgumentParser",
    "Gauge",
    "GuidedDecodingParams",
    "Histogram",
    "LLMEngine",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
    "cleanup_dist_env_and_memory",
]


def __getattr__(name: str) -> Any:
    """Imports on first use: importing a small module of this package must not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
