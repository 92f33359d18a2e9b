"""Updates the scheduler's state for a step in flight, so that the next one can be scheduled.

The device runs steps in the order of their submission, so a block may change its owner between two
steps without waiting. Only the sampled tokens are unknown: they are PENDING in the sequences until
`Scheduler.update` gets them. A stop token is noticed one step late; what was computed for its
sequence meanwhile is dropped.
"""

from ..core.request import PENDING, Sequence, State
from ..core.step_plan import SchedulerOutput
from .sequence_group import SequenceGroup
from .state import SchedulerState


def advance(state: SchedulerState, scheduler_output: SchedulerOutput) -> bool:
    """Counts a submitted step as computed; returns whether the next one can be scheduled now.

    It cannot if beam search must choose from the step's tokens first. Skips aborted choices.
    """
    awaited: list[Sequence] = []
    for sequence, start, length, samples, _, _ in scheduler_output.scheduled:
        if sequence.state is State.RUNNING:
            sequence.num_computed_tokens = start + length
            if samples:
                awaited.append(sequence)
    if any([sequence.request.candidates is not None for sequence in awaited]):
        return False  # beam search chooses which sequences continue, and with which tokens
    for sequence in awaited:
        _await_token(state, sequence)
    return True


def _await_token(state: SchedulerState, sequence: Sequence) -> None:
    group = state.group_of(sequence)
    state.prefilling.pop(sequence, None)
    if _ends(group, sequence):
        state.decoding.pop(sequence, None)
        state.blocked[sequence] = None
        return
    sequence.token_ids.append(PENDING)
    state.decoding[sequence] = None


def _ends(group: SequenceGroup, sequence: Sequence) -> bool:
    """Whether the sequence ends with this step, whatever token the step samples."""
    if sequence.request.pooling is not None:
        return True
    return sequence.output_length + 1 >= group.rule.max_output
