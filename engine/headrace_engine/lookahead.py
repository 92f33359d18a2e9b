"""What is booked of a step while it is in flight, so that the next one can be planned over it.

The device carries steps out in the order in which they are submitted, so blocks may change hands
between two steps without waiting. What is not known is which tokens a step chooses: they stand as
PENDING in the sequences until `Scheduler.update` has them. A sequence that a stop token ends is
noticed one step late, and what was computed for it meanwhile is dropped.
"""

from .books import Books
from .group import Group
from .plan import StepPlan
from .request import PENDING, Sequence, State


def advance(books: Books, plan: StepPlan) -> bool:
    """Books a submitted step as computed; whether the next one can be planned without its tokens.

    Aborted choices are passed over.
    """
    awaited: list[Sequence] = []
    for sequence, start, length, samples, _, _ in plan.scheduled:
        if sequence.state is State.RUNNING:
            sequence.computed = start + length
            if samples:
                awaited.append(sequence)
    if any([sequence.request.candidates is not None for sequence in awaited]):
        return False  # beam search chooses which sequences go on, and with which tokens
    for sequence in awaited:
        _await_token(books, sequence)
    return True


def _await_token(books: Books, sequence: Sequence) -> None:
    group = books.group_of(sequence)
    books.prefilling.pop(sequence, None)
    if _ends(group, sequence):
        books.decoding.pop(sequence, None)
        books.parked[sequence] = None
        return
    sequence.token_ids.append(PENDING)
    books.decoding[sequence] = None


def _ends(group: Group, sequence: Sequence) -> bool:
    """Whether its next token is the last, or there is none, whatever the step finds."""
    if sequence.request.pooling is not None:
        return True
    return sequence.output_length + 1 >= group.rule.max_output
