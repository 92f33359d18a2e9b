"""Limits the prompt tokens of a step while other sequences wait for their next token.

This is chunked prefill with a budget in seconds, which bounds the time between two tokens of a
sequence (Sarathi-Serve has a budget in tokens). Measured costs turn seconds into tokens.
"""

from math import inf

from ..core.step_cost import PrefillDecodeCosts

# Prompts advance even if the decodes alone take longer than the target.
LEAST_TOKENS = 64


class PrefillBudget:
    """Keeps steps with decodes within `itl_target` seconds; inf sets no limit."""

    def __init__(self, itl_target: float, costs: PrefillDecodeCosts) -> None:
        self._target = itl_target
        self._costs = costs

    def prompt_tokens(self, budget: int, decodes: int) -> int:
        """The prompt tokens of a step: at most `budget`, fewer if it has `decodes`."""
        token = self._costs.prompt(1)
        if decodes == 0 or self._target == inf or token <= 0.0:
            return budget
        fitting = int((self._target - self._costs.decode_step) / token)
        return min(budget, max(LEAST_TOKENS, fitting))
