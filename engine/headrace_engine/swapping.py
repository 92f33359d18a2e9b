"""Swap of sequences between device and host memory, for a scheduler's books.

It swaps what its costs say is cheaper to copy than to compute again, as long as host blocks last.
Nothing is copied here: the moves become part of the next plan.
"""

from .books import Books
from .host_cache import HostCache, Moves
from .phase_costs import PhaseCosts
from .plan import StepPlan, StepResult
from .request import Sequence, State
from .swap_costs import SwapCosts


class Swapping:
    """`swapped_out` counts sequences, `blocks_out` and `blocks_in` copied blocks, from the start.

    `outs` are (device, host) blocks, `ins` (host, device): the copies of the plan in the making.
    """

    def __init__(self, books: Books, host: HostCache, costs: PhaseCosts) -> None:
        self._books = books
        self.host = host
        self._costs = SwapCosts(costs)
        self.outs: Moves = []
        self.ins: Moves = []
        self.swapped_out = 0
        self.blocks_out = 0
        self.blocks_in = 0

    def swap_out(self, victim: Sequence) -> bool:
        """Moves a running sequence to host memory, if that is possible and the cheaper way.

        One whose first blocks fell out of a sliding window is never moved: it is computed again.
        """
        if victim.released:
            return False
        blocks = self._books.kv.rows_for(victim.computed)
        if not self.host.fits(victim) or not self._costs.swap_is_cheaper(blocks, victim.computed):
            return False
        self.host.swap_out(victim, self.outs)
        computed = victim.computed
        self._books.leave(victim)
        victim.computed = computed
        victim.transition(State.SWAPPED)
        self._books.swapped.push(self._books.key(victim), victim)
        self.swapped_out += 1
        return True

    def swap_in(self, sequence: Sequence, matched: list[int]) -> None:
        """Gives a sequence its device blocks back, `matched` found there; it is not queued."""
        self.host.swap_in(sequence, matched, self.ins)

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learns from a step what copying costs."""
        self._costs.observe(len(plan.swap_out) + len(plan.swap_in), result.swap_seconds)

    def take(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """The copies out and in of the plan that is made now."""
        outs, ins = tuple(self.outs), tuple(self.ins)
        self.blocks_out += len(outs)
        self.blocks_in += len(ins)
        self.outs.clear()
        self.ins.clear()
        return outs, ins
