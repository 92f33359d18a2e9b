"""What a step takes, from a profile that benchmarks/calibrate.py measured."""

from dataclasses import dataclass

from headrace_operator.simulation.engine_profile import EngineProfile


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step: its decodes by their number, as measured, plus its prompt tokens' time.

    Left out: how a longer context slows a step, and what a step takes that only has few tokens.
    """

    decode_seconds: tuple[float, ...]
    prompt_token_seconds: float

    @classmethod
    def of(cls, profile: EngineProfile) -> "CostModel":
        steps = tuple(profile.step_seconds())
        return cls(steps, 1.0 / profile.prefill_tokens_per_second)

    def step(self, decodes: int, prompt_tokens: int) -> float:
        decode = self.decode_seconds[decodes] if decodes else 0.0
        return decode + prompt_tokens * self.prompt_token_seconds
