"""Estimates of what decodes and prompts cost, learned from measured steps.

Reads no clock: the runner measures how long a step takes.
"""

# Each observation multiplies the weight of all earlier ones by this.
FORGET = 0.9


class Rate:
    """Average seconds for each unit of work; recent work counts more."""

    __slots__ = ("_seconds", "_units")

    def __init__(self) -> None:
        self._seconds = self._units = 0.0

    def observe(self, seconds: float, units: int) -> None:
        self._seconds = self._seconds * FORGET + max(0.0, seconds)
        self._units = self._units * FORGET + units

    def scale(self, factor: float) -> None:
        self._seconds *= factor

    def of(self, units: int) -> float:
        """Seconds for `units` units; 0 if nothing was observed."""
        return 0.0 if self._units == 0.0 else self._seconds / self._units * units


class PrefillDecodeCosts:
    """Splits a step's seconds into those of its decodes and those of its prompt tokens.

    The decodes' share is the time of recent steps without prompt tokens. The model ignores that
    longer contexts cost more.
    """

    def __init__(self) -> None:
        self._token = Rate()
        self._decode_step = Rate()

    def observe(self, decode_tokens: int, prompt_tokens: int, seconds: float) -> None:
        """Learns from a step. Steps with `seconds` 0 were not timed and are ignored."""
        if seconds <= 0.0:
            return
        if prompt_tokens == 0:
            self._decode_step.observe(seconds, 1)
            return
        decoding = self.decode_step if decode_tokens else 0.0
        self._token.observe(seconds - decoding, prompt_tokens)

    @property
    def decode_step(self) -> float:
        """Seconds of a step that only decodes; 0 if none was timed."""
        return self._decode_step.of(1)

    def prompt(self, tokens: int) -> float:
        """Seconds for `tokens` prompt tokens; 0 if none was timed."""
        return self._token.of(tokens)
