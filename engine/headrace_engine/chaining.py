"""Where a step takes tokens from that the step before it chooses, which are not known yet.

The ids themselves never leave the device for this; what is sampled with a look at them (penalties,
grammars) gets them once they have come to the host, behind the forward pass.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .outputs import SampledToken
from .plan import SampleRow, StepPlan
from .request import PENDING, Sequence

Ints = npt.NDArray[np.int64]
# Stands in for a token that was never chosen, as its logits were broken; its sequence ends.
NO_TOKEN = 0
# What follows a sequence's known tokens while the step before has not chosen it.
AHEAD = (PENDING,)


@dataclass(frozen=True, slots=True)
class Links:
    """`places` int64 [P] in the step's input ids; `sources` int64 [P] are the rows of the step
    before that sample what belongs there. `sampling` are the step's rows of logits, of which
    `awaited` are behind such a token: by their index, with the same rows of the step before.
    """

    places: Ints
    sources: Ints
    sampling: tuple[SampleRow, ...]
    awaited: Mapping[int, int]

    def resolve(self, chosen: Rows[SampledToken | None]) -> tuple[SampleRow, ...]:
        """The rows of logits, with the tokens that the step before chose."""
        rows = list(self.sampling)
        for index, source in self.awaited.items():
            token = chosen[source]
            ahead = (NO_TOKEN if token is None else token.token_id,)
            rows[index] = rows[index]._replace(ahead=ahead)
        return tuple(rows)

    @property
    def needs_ids(self) -> bool:
        """Whether rows are sampled with a look at tokens that are not known yet."""
        return any(self.sampling[index].sequence.adjusted for index in self.awaited)


def link(plan: StepPlan, before: StepPlan | None) -> Links:
    """How a step hangs together with the one before; None: all tokens are known."""
    assert not any([item.drafts for item in plan.scheduled]), "drafts follow tokens that are known"
    sources = {} if before is None else _sampling_rows(before)
    if len(plan.scheduled) == plan.num_tokens and _all_pending(plan):
        return _all_linked(plan, sources)
    places: list[int] = []
    found: list[int] = []
    sampling: list[SampleRow] = []
    awaited: dict[int, int] = {}
    place = -1
    for item in plan.scheduled:
        sequence, end = item.sequence, item.start + item.length
        place += item.length
        pending = sequence.token_ids[end - 1] == PENDING
        if pending:
            places.append(place)
            found.append(sources[sequence])
            awaited[len(sampling)] = sources[sequence]
        if item.samples:
            ahead, known = (AHEAD, end - 1) if pending else ((), end)
            sampling.append(SampleRow(sequence, ahead, known))
    return Links(_ints(places), _ints(found), tuple(sampling), awaited)


def _all_pending(plan: StepPlan) -> bool:
    """Of a step with one token a sequence: whether the step before chooses each of them."""
    return all([item.samples and item[0].token_ids[item[1]] == PENDING for item in plan.scheduled])


def _all_linked(plan: StepPlan, sources: Mapping[Sequence, int]) -> Links:
    """As `link` does, for a step of nothing else: the most frequent one, and without a loop."""
    found = [sources[item.sequence] for item in plan.scheduled]
    rows = [SampleRow(sequence, AHEAD, start) for sequence, start, *_ in plan.scheduled]
    return Links(np.arange(len(rows)), _ints(found), tuple(rows), dict(enumerate(found)))


def _sampling_rows(plan: StepPlan) -> dict[Sequence, int]:
    sampling = [item.sequence for item in plan.scheduled if item.samples]
    return {sequence: row for row, sequence in enumerate(sampling)}


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
