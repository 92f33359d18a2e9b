"""Whether it is cheaper to swap a sequence out and in, or to compute its KV again."""

from .phase_costs import PhaseCosts, Rate

FADE = 0.95
"""What a decision against swapping leaves of its price, so that it is tried again in time."""


class SwapCosts:
    """`phases` knows what computing costs; what a copied block costs is learned here."""

    def __init__(self, phases: PhaseCosts) -> None:
        self._phases = phases
        self._block = Rate()

    def observe(self, blocks: int, seconds: float) -> None:
        """Learns from a step's copies, out and in together; 0 seconds were not timed."""
        if blocks and seconds > 0.0:
            self._block.observe(seconds, blocks)

    def swap_is_cheaper(self, blocks: int, tokens: int) -> bool:
        """For a sequence of `tokens` computed tokens in `blocks`, each copied out and in.

        Where no copy was timed yet, swapping is tried; where no prompt was, it is not.
        """
        if self._block.of(2 * blocks) < self._phases.prompt(tokens):
            return True
        self._block.scale(FADE)
        return False
