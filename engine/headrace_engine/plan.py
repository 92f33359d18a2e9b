"""The scheduler's decision for one step and the runner's answer: all that passes between them."""

from dataclasses import dataclass
from typing import NamedTuple

from .outputs import SampledToken
from .request import Sequence


class ScheduledSequence(NamedTuple):
    """A run of one sequence's known tokens, positions [start, start + length).

    The KV of positions [0, start) is in the sequence's blocks; this step computes the rest of the
    run and, where it ends with the last known token, samples the next one (`samples`).
    A tuple, as one is made for each sequence in each step.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One ragged batch: decodes (length 1) first, then prefill chunks.

    `copies` are (source, destination) blocks of copy-on-write, copied before the forward pass.
    """

    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[tuple[int, int], ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """One sampled token for each scheduled sequence with `samples`, in the plan's order.

    None where the model gave NaN or infinite logits: no token of that sequence can be trusted.
    """

    sampled: tuple[SampledToken | None, ...]
