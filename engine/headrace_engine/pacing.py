"""How much of prompts a step computes while other sequences wait for their next token.

Chunked prefill with a budget in seconds instead of tokens (after Sarathi-Serve's token budget for a
bound on the time between tokens): the budget follows from what steps have cost.
"""

from math import inf

from .phase_costs import PhaseCosts

# However long a step of decodes alone takes, prompts go on.
LEAST_TOKENS = 64


class Pacing:
    """`itl_target`: seconds that a step should take at most while sequences decode; inf: any."""

    def __init__(self, itl_target: float, costs: PhaseCosts) -> None:
        self._target = itl_target
        self._costs = costs

    def prompt_tokens(self, budget: int, decodes: int) -> int:
        """At most `budget`; all of it where nothing decodes, or no prompt was timed yet."""
        token = self._costs.prompt(1)
        if decodes == 0 or self._target == inf or token <= 0.0:
            return budget
        fitting = int((self._target - self._costs.decode_step) / token)
        return min(budget, max(LEAST_TOKENS, fitting))
