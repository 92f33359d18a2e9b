"""Swaps sequences between device and host memory.

A sequence is swapped if that is estimated cheaper than recomputing it and host blocks are free.
Nothing is copied here: the copies become part of the next SchedulerOutput.
"""

from ..core.request import Sequence, State
from ..core.step_cost import PrefillDecodeCosts
from ..core.step_plan import SchedulerOutput, StepResult
from ..kv_cache.host_block_tables import HostBlockTables, Moves
from .state import SchedulerState
from .swap_costs import SwapCosts


class Swapping:
    """Swaps the sequences of one scheduler.

    `outs` are (device, host) blocks and `ins` (host, device) blocks: the copies of the next step.
    `swapped_out` counts sequences, `blocks_out` and `blocks_in` copied blocks, since the start.
    """

    def __init__(
        self, state: SchedulerState, host: HostBlockTables, costs: PrefillDecodeCosts
    ) -> None:
        self._state = state
        self.host = host
        self._costs = SwapCosts(costs)
        self.outs: Moves = []
        self.ins: Moves = []
        self.swapped_out = 0
        self.blocks_out = 0
        self.blocks_in = 0

    def swap_out(self, victim: Sequence) -> bool:
        """Moves a running sequence to host memory, if that is possible and cheaper.

        A sequence that has released blocks of a sliding window is never moved, but recomputed.
        """
        if victim.released:
            return False
        blocks = self._state.kv.rows_for(victim.num_computed_tokens)
        if not self.host.fits(victim) or not self._costs.swap_is_cheaper(
            blocks, victim.num_computed_tokens
        ):
            return False
        self.host.swap_out(victim, self.outs)
        computed = victim.num_computed_tokens
        self._state.leave(victim)
        victim.num_computed_tokens = computed
        victim.transition(State.SWAPPED)
        self._state.swapped.push(self._state.key(victim), victim)
        self.swapped_out += 1
        return True

    def swap_in(self, sequence: Sequence, matched: list[int]) -> None:
        """Gives a swapped sequence device blocks again; `matched` are cached there already."""
        self.host.swap_in(sequence, matched, self.ins)

    def observe(self, scheduler_output: SchedulerOutput, result: StepResult) -> None:
        """Learns from a step the cost of copying."""
        self._costs.observe(
            len(scheduler_output.swap_out) + len(scheduler_output.swap_in), result.swap_seconds
        )

    def take(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Takes the copies out and in, for the step that is scheduled now."""
        outs, ins = tuple(self.outs), tuple(self.ins)
        self.blocks_out += len(outs)
        self.blocks_in += len(ins)
        self.outs.clear()
        self.ins.clear()
        return outs, ins
