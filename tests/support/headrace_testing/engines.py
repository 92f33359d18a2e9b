"""Running real engines in tests: which attention backends this machine has, requests, outputs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headrace_common.sampling.params import SamplingParams
from headrace_engine import attention
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.errors import ConfigError
from headrace_engine.core.outputs import TokenLogprobs
from headrace_engine.core.request import EngineRequest
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner


@cache
def cpu_backends() -> tuple[str, ...]:
    """Names of the attention backends that run on this machine's CPU, the fastest last."""
    try:
        attention.select("cpu", torch.device("cpu"), torch.float32)
    except ConfigError:
        return ("reference",)
    return ("reference", "cpu")


@dataclass(slots=True)
class Output:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: int = 0


def engine_config(folder: Path, **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "attention_backend": "reference",
        "device": "cpu",
        "block_size": 4,
        "num_blocks": 512,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 64,
    }
    return EngineConfig(model=str(folder), **{**defaults, **options})


def make_runner(folder: Path, **options: Any) -> ModelRunner:
    return ModelRunner(engine_config(folder, **options))


def greedy(length: int, **options: Any) -> SamplingParams:
    """Greedy decoding of exactly `length` tokens, as the reference's paths are made."""
    return SamplingParams(temperature=0.0, max_tokens=length, min_tokens=length, **options)


def request(
    name: str, prompt: Sequence[int], params: SamplingParams, seed: int = 0
) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), params=params, seed=seed)


def run(engine: Engine, requests: Iterable[EngineRequest]) -> dict[tuple[str, int], Output]:
    """Runs requests, all added at once, to their ends; returns outputs by (request id, choice)."""
    for one in requests:
        engine.add_request(one)
    outputs: dict[tuple[str, int], Output] = {}
    while engine.has_work:
        for step in engine.step():
            output = outputs.setdefault((step.request_id, step.choice), Output())
            output.token_ids.extend(step.token_ids)
            output.logprobs.extend(step.logprobs or ())
            output.cached_tokens = max(output.cached_tokens, step.cached_tokens)
            output.finish_reason = step.finish_reason
    return outputs
