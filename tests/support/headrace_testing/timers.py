"""Fake measurements of device time, for tests of the autotuner."""

from headrace_engine.autotune.autotuner import Run


class LastWins:
    """A device on which each candidate is faster than the one before."""

    def __init__(self) -> None:
        self._seconds = 1.0

    def __call__(self, run: Run) -> float:
        self._seconds *= 0.9
        return self._seconds
