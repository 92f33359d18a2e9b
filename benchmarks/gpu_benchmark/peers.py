"""Runs transformers on the same device and shape, for gpu.py: continuous batching and static
batches."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .shapes import Job

STATIC_BATCH = 16


def load(folder: Path, device: str) -> Any:
    """A model with the folder's config.json and random weights, which are created on the device."""
    import transformers

    torch.set_grad_enabled(False)
    config = transformers.AutoConfig.from_pretrained(folder)
    make: Any = transformers.AutoModelForCausalLM
    with torch.device(device):
        return make.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def static_batches(model: Any, jobs: list[Job], device: str, limit: float) -> tuple[int, float]:
    """Runs batches of STATIC_BATCH until `limit`; returns the number of requested tokens generated,
    and the seconds."""
    made, begun = 0, time.perf_counter()
    for start in range(0, len(jobs), STATIC_BATCH):
        batch = jobs[start : start + STATIC_BATCH]
        left = limit - (time.perf_counter() - begun)
        if left <= 0:
            break
        made += _static_batch(model, batch, device, left)
    return made, time.perf_counter() - begun


def _static_batch(model: Any, jobs: list[Job], device: str, limit: float) -> int:
    width, longest = max(len(job.prompt) for job in jobs), max(job.output for job in jobs)
    pads = [width - len(job.prompt) for job in jobs]
    ids = torch.tensor([[0] * pad + job.prompt for pad, job in zip(pads, jobs, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
    made = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=longest,
        min_new_tokens=longest,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        max_time=limit,
    )
    steps = made.shape[1] - width
    return sum(min(job.output, steps) for job in jobs)


def _cache_options(options: Mapping[str, Any]) -> dict[str, Any]:
    if not options:
        return {}
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    return {"continuous_batching_config": ContinuousBatchingConfig(**options)}


def _hints(jobs: list[Job]) -> dict[str, Any]:
    """Hints from which newer versions of transformers derive the size of their cache."""
    try:
        from transformers.generation.continuous_batching.utils import WorkloadHints
    except ImportError:
        return {}
    return {
        "workload_hints": WorkloadHints(
            max_prompt_length=max(len(job.prompt) for job in jobs),
            max_generated_length=max(job.output for job in jobs),
            num_requests=len(jobs),
        )
    }


def continuous(
    model: Any, jobs: list[Job], limit: float, options: Mapping[str, Any]
) -> tuple[int, float]:
    """Runs transformers' continuous batching until `limit`; returns tokens and seconds. `options`
    are those of ContinuousBatchingConfig."""
    import transformers

    make_config: Any = transformers.GenerationConfig
    config = make_config(
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
        max_new_tokens=max(job.output for job in jobs),
    )
    manager = model.init_continuous_batching(
        generation_config=config, **_hints(jobs), **_cache_options(options)
    )
    manager.start()
    try:
        # Its cache is allocated, and its kernels are compiled, when the first request arrives.
        _collect(manager, [Job(jobs[0].prompt, 2)], 2 * limit)
        return _collect(manager, jobs, limit)
    finally:
        manager.stop(block=True, timeout=10)


def _collect(manager: Any, jobs: list[Job], limit: float) -> tuple[int, float]:
    """Runs the jobs for at most `limit` seconds; returns the tokens, including those of unfinished
    requests, and the seconds."""
    begun, made, finished = time.perf_counter(), dict[str, int](), 0
    for job in jobs:
        manager.add_request(job.prompt, max_new_tokens=job.output, streaming=True)
    while finished < len(jobs) and time.perf_counter() - begun < limit:
        result = manager.get_result(timeout=1)
        if result is not None:
            if result.error:
                raise RuntimeError(result.error)
            made[result.request_id] = len(result.generated_tokens)
            finished += bool(result.is_finished())
        elif not manager.is_running():
            raise RuntimeError("transformers' continuous batching stopped")
    return sum(made.values()), time.perf_counter() - begun
