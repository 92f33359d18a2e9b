"""What decodes and prompts cost, learned from the steps themselves. Reads no clock: the runner says
how long a step took.
"""

FORGET = 0.9
"""What an observation leaves of the weight of those before it."""


class Rate:
    """Seconds for each unit of work, weighted by units; recent work counts more."""

    __slots__ = ("_seconds", "_units")

    def __init__(self) -> None:
        self._seconds = self._units = 0.0

    def observe(self, seconds: float, units: int) -> None:
        self._seconds = self._seconds * FORGET + max(0.0, seconds)
        self._units = self._units * FORGET + units

    def scale(self, factor: float) -> None:
        self._seconds *= factor

    def of(self, units: int) -> float:
        """Seconds for `units`; 0 where nothing was observed."""
        return 0.0 if self._units == 0.0 else self._seconds / self._units * units


class PhaseCosts:
    """A step's seconds are its decodes' (as the last steps without prompt tokens took) and its
    prompt tokens'. That longer contexts cost more is left out.
    """

    def __init__(self) -> None:
        self._token = Rate()
        self._decode_step = Rate()

    def observe(self, decode_tokens: int, prompt_tokens: int, seconds: float) -> None:
        """Learns from a step; one whose `seconds` are 0 was not timed."""
        if seconds <= 0.0:
            return
        if prompt_tokens == 0:
            self._decode_step.observe(seconds, 1)
            return
        decoding = self.decode_step if decode_tokens else 0.0
        self._token.observe(seconds - decoding, prompt_tokens)

    @property
    def decode_step(self) -> float:
        """Seconds of a step that only decodes; 0 where none was timed."""
        return self._decode_step.of(1)

    def prompt(self, tokens: int) -> float:
        """Seconds for so many prompt tokens; 0 where none was timed."""
        return self._token.of(tokens)
