"""How much of prompts a step computes while other sequences wait for their next token.

Chunked prefill with a budget in seconds instead of tokens (after Sarathi-Serve's token budget for a
bound on the time between tokens): the budget follows from what steps have cost. Reads no clock.
"""

from math import inf

from .swap_costs import Rate

# However long a step of decodes alone takes, prompts go on.
LEAST_TOKENS = 64


class Pacing:
    """`itl_target`: seconds that a step should take at most while sequences decode; inf: no matter.

    A step's seconds beyond its decodes' (as the last steps without prompt tokens took) are its
    prompt tokens'.
    """

    def __init__(self, itl_target: float) -> None:
        self._target = itl_target
        self._token = Rate()
        self._decode_step = Rate()

    def observe(self, decode_tokens: int, prompt_tokens: int, seconds: float) -> None:
        """Learns from a step; one whose `seconds` are 0 was not timed."""
        if self._target == inf or seconds <= 0.0:
            return
        if prompt_tokens == 0:
            self._decode_step.observe(seconds, 1)
            return
        decoding = self._decode_step.of(1, 0.0) if decode_tokens else 0.0
        self._token.observe(seconds - decoding, prompt_tokens)

    def prompt_tokens(self, budget: int, decodes: int) -> int:
        """At most `budget`; all of it where nothing decodes, or no prompt was timed yet."""
        token = self._token.of(1, 0.0)
        if decodes == 0 or self._target == inf or token <= 0.0:
            return budget
        fitting = int((self._target - self._decode_step.of(1, 0.0)) / token)
        return min(budget, max(LEAST_TOKENS, fitting))
