"""Swaps sequences between device and host memory.

A sequence is swapped if that is estimated cheaper than recomputing it and host blocks are free.
Nothing is copied here: the copies become part of the next SchedulerOutput.
"""

from ..core.request import Sequence, State
from ..core.step_cost import PrefillDecodeCosts
from ..core.step_plan import SchedulerOutput, StepResult
from ..kv_cache.host_block_tables import HostBlockTables, Moves
from .copy_costs import CopyCosts
from .state import SchedulerState


class Swapping:
    """Swaps the sequences of one scheduler.

    `outs` are (device, host) blocks and `ins` (host, device) blocks: the copies of the next step.
    `swapped_out` counts sequences, `blocks_out` and `blocks_in` copied blocks, since the start, and
    `seconds` the time of copies that a step waited for.
    """

    def __init__(
        self, state: SchedulerState, host: HostBlockTables, costs: PrefillDecodeCosts
    ) -> None:
        self._state = state
        self.host = host
        self.costs = CopyCosts(costs)
        self.outs: Moves = []
        self.ins: Moves = []
        self.swapped_out = 0
        self.blocks_out = 0
        self.blocks_in = 0
        self.seconds = 0.0

    def swap_out(self, victim: Sequence) -> bool:
        """Moves a running sequence to host memory, if that is possible and cheaper.

        A sequence that has released blocks of a sliding window is never moved, but recomputed; so
        is one that was started for the same step, since its KV is not on the device yet.
        """
        if victim.released or self._is_coming(victim):
            return False
        blocks = self._state.kv.rows_for(victim.num_computed_tokens)
        if not self.host.fits(victim) or not self.costs.swap_is_cheaper(
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

    def _is_coming(self, sequence: Sequence) -> bool:
        """Whether blocks of the sequence are copied to the device in the step that is scheduled."""
        blocks = {device for _, device in self.ins}
        return not blocks.isdisjoint(sequence.block_table)

    def swap_in(self, sequence: Sequence, matched: list[int]) -> None:
        """Gives a swapped sequence device blocks again; `matched` are cached there already."""
        self.host.swap_in(sequence, matched, self.ins)

    def observe(self, scheduler_output: SchedulerOutput, result: StepResult) -> None:
        """Learns from a step the cost of copying."""
        self.costs.observe(
            len(scheduler_output.swap_out) + len(scheduler_output.swap_in), result.swap_seconds
        )
        self.seconds += result.swap_seconds
        self.blocks_out += len(scheduler_output.saves)

    def take(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Takes the copies out and in, for the step that is scheduled now."""
        if not self.outs and not self.ins:
            return (), ()
        # A block may have got a second owner, if the policy preempted the first one at once.
        last = {device: host for host, device in self.ins}
        outs = tuple(self.outs)
        ins = tuple((host, device) for device, host in last.items())
        self.blocks_out += len(outs)
        self.blocks_in += len(ins)
        self.outs.clear()
        self.ins.clear()
        return outs, ins
