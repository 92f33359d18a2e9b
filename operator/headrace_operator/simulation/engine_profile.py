"""The speed of one engine in a JSON file: measured by benchmarks/calibrate.py, or the example."""

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from .errors import SimulationError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """Speeds of one engine. `decode_step` maps a batch size to seconds of a step that only decodes.

    `cold_start_seconds` is from the pod's creation until it serves; `kv_tokens` the tokens that its
    KV cache holds, `gpus` what one engine costs. `switch_seconds` is from the moment at which one
    engine begins to fall asleep until another one on the same accelerator is awake.
    """

    name: str
    prefill_tokens_per_second: float
    decode_step: dict[int, float]
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int
    cold_start_seconds: float
    gpus: float = 1.0
    switch_seconds: float = 3.0

    def step_seconds(self) -> list[float]:
        """Seconds of a decode step for each batch size from 0 to `max_num_seqs`, interpolated.

        Above the largest measured batch, the line through the last two is extended.
        """
        sizes = sorted(self.decode_step)
        seconds = [self.decode_step[size] for size in sizes]
        wanted = np.arange(self.max_num_seqs + 1)
        found = np.interp(wanted, sizes, seconds)
        if len(sizes) > 1 and sizes[-1] < self.max_num_seqs:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
            found += np.maximum(0, wanted - sizes[-1]) * slope
        return [float(each) for each in found]

    def requests_per_second(self, share: float, prompt: float, output: float) -> float:
        """Steady speed of an engine with `share` of its sequences running, mean lengths given."""
        running = max(1, round(share * self.max_num_seqs))
        decode = self.step_seconds()[running] * output
        return running / (decode + running * prompt / self.prefill_tokens_per_second)


def load_profile(path: Path | None) -> EngineProfile:
    """The profile of a file, or the bundled example. Raises SimulationError."""
    if path is None:
        text = files(__package__).joinpath("example_gpu.json").read_text()
        return _parse(text, "the bundled profile")
    try:
        return _parse(path.read_text(), str(path))
    except OSError as error:
        raise SimulationError(f"{path}: {error.strerror}; name a readable file") from error


def _parse(text: str, source: str) -> EngineProfile:
    try:
        values: dict[str, Any] = json.loads(text)
        steps = {int(size): float(took) for size, took in values.pop("decode_step").items()}
        profile = EngineProfile(**values, decode_step=steps)
        _check(profile)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SimulationError(
            f"{source}: {error}; write a profile with benchmarks/calibrate.py"
        ) from error
    return profile


def _check(profile: EngineProfile) -> None:
    for name in ("prefill_tokens_per_second", "max_num_seqs", "max_num_batched_tokens"):
        if not getattr(profile, name) > 0:
            raise ValueError(f"{name} must be above 0, not {getattr(profile, name)}")
    for name in ("kv_tokens", "cold_start_seconds", "gpus", "switch_seconds"):
        if not getattr(profile, name) > 0:
            raise ValueError(f"{name} must be above 0, not {getattr(profile, name)}")
    steps = profile.decode_step
    if not steps or min(steps) < 1 or min(steps.values()) <= 0:
        raise ValueError("decode_step must map batch sizes above 0 to seconds above 0")
    if profile.max_num_batched_tokens <= profile.max_num_seqs:
        raise ValueError("max_num_batched_tokens must be above max_num_seqs")
