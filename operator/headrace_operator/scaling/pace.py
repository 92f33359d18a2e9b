"""How long an engine needs for a token, by the sequences that it runs.

A sequence gets a token every a + b * sequences seconds. The two numbers are those of least squares
in measurements of the sequences and of the output tokens a second, with weights that fall with age.
"""

from dataclasses import dataclass

from .observation import EngineSignals

MEMORY = 600.0
"""Seconds after which a measurement counts a third."""
_DISTINCT = 1e-3
"""The least share of the products' sum that must be left for loads to count as different."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Weighted sums over measurements of one engine with `n` sequences and `r` tokens a second.

    Each field is the sum of the product that its letters spell. `prefill` is the mean seconds of a
    prefill.
    """

    rr: float = 0.0
    rrn: float = 0.0
    rrnn: float = 0.0
    rn: float = 0.0
    rnn: float = 0.0
    prefill: float | None = None

    def line(self) -> tuple[float, float]:
        """Seconds between two tokens of a sequence: (of the first one, per further sequence).

        If all measurements had the same load, the time is in proportion to the sequences, which is
        the most that further ones can cost.
        """
        spread = self.rr * self.rrnn - self.rrn**2
        if spread > _DISTINCT * self.rr * self.rrnn:
            base = (self.rn * self.rrnn - self.rnn * self.rrn) / spread
            slope = (self.rnn * self.rr - self.rn * self.rrn) / spread
            if base >= 0 and slope >= 0:
                return base, slope
            if slope < 0:
                return self.rn / self.rr, 0.0
        return 0.0, self.rnn / self.rrnn

    def sequences_at(self, token_seconds: float) -> float:
        """The most sequences of an engine that get a token within these seconds; at least 1."""
        if not self.rrnn:
            return float("inf")
        base, slope = self.line()
        if base >= token_seconds:
            return 1.0
        return max(1.0, (token_seconds - base) / slope) if slope > 0 else float("inf")


def learned_pace(pace: Pace, engines: EngineSignals, ready: int, elapsed: float) -> Pace:
    """The pace with a new measurement, `elapsed` seconds after the one before."""
    total = engines.output_tokens_per_second
    if total is None:
        return pace
    kept = MEMORY / (MEMORY + elapsed)
    n, r = engines.running / ready, total / ready
    prefill, measured = pace.prefill, engines.prefill_seconds
    if prefill is None or measured is None:
        prefill = measured if prefill is None else prefill
    else:
        prefill = kept * prefill + (1 - kept) * measured
    return Pace(
        rr=kept * pace.rr + r * r,
        rrn=kept * pace.rrn + r * r * n,
        rrnn=kept * pace.rrnn + r * r * n * n,
        rn=kept * pace.rn + r * n,
        rnn=kept * pace.rnn + r * n * n,
        prefill=prefill,
    )
