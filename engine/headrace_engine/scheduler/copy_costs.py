"""Estimates whether copying KV to or from host memory is cheaper than computing it."""

from ..core.step_cost import PrefillDecodeCosts, Rate

# Each decision against copying multiplies its estimated cost by this factor, so that it is tried
# again.
FADE = 0.95


class CopyCosts:
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
        return self._is_cheaper(2 * blocks, self._step_costs.prompt(tokens))

    def load_is_cheaper(self, blocks: int, tokens: int) -> bool:
        """Compares copying `blocks` in with computing `tokens` tokens.

        True if either was not timed yet: a new engine first uses what others have computed.
        """
        prompt = self._step_costs.prompt(tokens)
        return prompt == 0.0 or self._is_cheaper(blocks, prompt)

    def _is_cheaper(self, blocks: int, seconds: float) -> bool:
        if self._block.of(blocks) < seconds:
            return True
        self._block.scale(FADE)
        return False
