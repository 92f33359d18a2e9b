"""Estimates whether swapping a sequence out and in is cheaper than recomputing its KV."""

from ..core.step_cost import PrefillDecodeCosts, Rate

# Each decision against swapping multiplies its estimated cost by this factor, so that it is tried
# again.
FADE = 0.95


class SwapCosts:
    """Compares the cost of copying blocks, which it measures, with `step_costs` of prefills."""

    def __init__(self, step_costs: PrefillDecodeCosts) -> None:
        self._step_costs = step_costs
        self._block = Rate()

    def observe(self, blocks: int, seconds: float) -> None:
        """Learns from a step's copies, out and in. Copies with 0 seconds were not timed."""
        if blocks and seconds > 0.0:
            self._block.observe(seconds, blocks)

    def swap_is_cheaper(self, blocks: int, tokens: int) -> bool:
        """Compares copying `blocks` out and in with computing `tokens` tokens.

        True if no copy was timed yet, to try one; False if no prompt was timed yet.
        """
        if self._block.of(2 * blocks) < self._step_costs.prompt(tokens):
            return True
        self._block.scale(FADE)
        return False
