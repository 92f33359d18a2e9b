"""Whether it is cheaper to swap a sequence out and in, or to compute its KV again.

Learned from the steps themselves: seconds a copied block and seconds a prompt token. Reads no
clock; the runner says how long a step and its copies took.
"""

from .plan import StepPlan, StepResult

FORGET = 0.9
"""What an observation leaves of the weight of those before it."""
FADE = 0.95
"""What a decision against swapping leaves of its price, so that it is tried again in time."""


class Rate:
    """Seconds for each unit of work, weighted by units; recent work counts more."""

    __slots__ = ("_seconds", "_units")

    def __init__(self) -> None:
        self._seconds = self._units = 0.0

    def observe(self, seconds: float, units: int) -> None:
        self._seconds = self._seconds * FORGET + max(0.0, seconds)
        self._units = self._units * FORGET + units

    def fade(self) -> None:
        self._seconds *= FADE

    def of(self, units: int, unknown: float) -> float:
        """Seconds for `units`; `unknown` where nothing was observed."""
        return unknown if self._units == 0.0 else self._seconds / self._units * units


class SwapCosts:
    """A step's seconds beyond its copies are its decodes' (as the last steps without prompt tokens
    took) and its prompt tokens'. That longer contexts cost more is left out.
    """

    def __init__(self) -> None:
        self._block = Rate()
        self._token = Rate()
        self._decode_step = Rate()

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learns from a step; one whose `seconds` are 0 was not timed."""
        moved = len(plan.swap_out) + len(plan.swap_in)
        if moved and result.swap_seconds > 0.0:
            self._block.observe(result.swap_seconds, moved)
        computing = result.seconds - result.swap_seconds
        if computing <= 0.0:
            return
        decodes = sum(1 for item in plan.scheduled if item.samples and item.length == 1)
        if decodes == len(plan.scheduled):
            self._decode_step.observe(computing, 1)
            return
        prompt = sum(item.length for item in plan.scheduled if item.length > 1 or not item.samples)
        before = self._decode_step.of(1, 0.0) if decodes else 0.0
        self._token.observe(computing - before, prompt)

    def swap_is_cheaper(self, blocks: int, tokens: int) -> bool:
        """For a sequence of `tokens` computed tokens in `blocks`, each copied out and in.

        Where no copy was timed yet, swapping is tried; where no prompt was, it is not.
        """
        recompute = self._token.of(tokens, 0.0)
        swap = self._block.of(2 * blocks, 0.0)
        if swap < recompute:
            return True
        self._block.fade()
        return False
