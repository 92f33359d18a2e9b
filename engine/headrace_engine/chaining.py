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
    sources = {} if before is None else _sampling_rows(before)
    places: list[int] = []
    found: list[int] = []
    sampling: list[SampleRow] = []
    awaited: dict[int, int] = {}
    place = -1
    for item in plan.scheduled:
        assert not item.drafts, "drafts follow tokens that are known"
        sequence, end = item.sequence, item.start + item.length
        place += item.length
        pending = sequence.token_ids[end - 1] == PENDING
        if pending:
            places.append(place)
            found.append(sources[sequence])
            awaited[len(sampling)] = sources[sequence]
        if item.samples:
            ahead, known = ((PENDING,), end - 1) if pending else ((), end)
            sampling.append(SampleRow(sequence, ahead, known))
    return Links(_ints(places), _ints(found), tuple(sampling), awaited)


def _sampling_rows(plan: StepPlan) -> dict[Sequence, int]:
    sampling = [item.sequence for item in plan.scheduled if item.samples]
    return {sequence: row for row, sequence in enumerate(sampling)}


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
