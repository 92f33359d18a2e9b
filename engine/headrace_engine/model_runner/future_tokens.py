"""Tokens that a step reads but the step before it has not sampled yet.

They are copied on the device, without a copy to the host. Rows with penalties or grammars that need
these tokens get them after the forward pass, once they are on the host.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..core.outputs import SampledToken
from ..core.request import PENDING, Sequence
from ..core.step_plan import SampleRow, SchedulerOutput

Ints = npt.NDArray[np.int64]
# The number that stands for a token whose logits were NaN or infinite; its sequence ends.
NO_TOKEN = 0
# The number that stands for the token after a sequence's known ones, until the step before has
# sampled it.
AHEAD = (PENDING,)


@dataclass(frozen=True, slots=True)
class FutureTokens:
    """The places of unknown tokens in a step.

    Input position `places[i]` gets the token that row `sources[i]` of the step before samples (both
    int64 [P]). `sampling` are the step's rows of logits; `awaited` maps the index of each row that
    follows such a token to the same source row.
    """

    places: Ints
    sources: Ints
    sampling: tuple[SampleRow, ...]
    awaited: Mapping[int, int]

    def resolve(self, chosen: Rows[SampledToken | None]) -> tuple[SampleRow, ...]:
        """The rows of logits with the tokens that the step before chose."""
        rows = list(self.sampling)
        for index, source in self.awaited.items():
            token = chosen[source]
            ahead = (NO_TOKEN if token is None else token.token_id,)
            rows[index] = rows[index]._replace(ahead=ahead)
        return tuple(rows)

    @property
    def needs_ids(self) -> bool:
        """Whether the penalties or grammars of any row need tokens that are not known yet."""
        return any(self.sampling[index].sequence.adjusted for index in self.awaited)


def find_future_tokens(
    scheduler_output: SchedulerOutput, before: SchedulerOutput | None
) -> FutureTokens:
    """Finds the tokens of a step that the step `before` samples; None: all are known."""
    assert not any([item.drafts for item in scheduler_output.scheduled]), (
        "drafts follow tokens that are known"
    )
    sources = {} if before is None else _sampling_rows(before)
    if len(scheduler_output.scheduled) == scheduler_output.num_tokens and _all_pending(
        scheduler_output
    ):
        return _all_future(scheduler_output, sources)
    places: list[int] = []
    found: list[int] = []
    sampling: list[SampleRow] = []
    awaited: dict[int, int] = {}
    place = -1
    for item in scheduler_output.scheduled:
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
    return FutureTokens(_ints(places), _ints(found), tuple(sampling), awaited)


def _all_pending(scheduler_output: SchedulerOutput) -> bool:
    """Whether each sequence of the step takes one token, which the step before samples."""
    return all(
        [
            item.samples and item[0].token_ids[item[1]] == PENDING
            for item in scheduler_output.scheduled
        ]
    )


def _all_future(scheduler_output: SchedulerOutput, sources: Mapping[Sequence, int]) -> FutureTokens:
    """Finds the tokens of a step whose tokens are all pending: the most frequent case, without a
    loop."""
    found = [sources[item.sequence] for item in scheduler_output.scheduled]
    rows = [SampleRow(sequence, AHEAD, start) for sequence, start, *_ in scheduler_output.scheduled]
    return FutureTokens(np.arange(len(rows)), _ints(found), tuple(rows), dict(enumerate(found)))


def _sampling_rows(scheduler_output: SchedulerOutput) -> dict[Sequence, int]:
    sampling = [item.sequence for item in scheduler_output.scheduled if item.samples]
    return {sequence: row for row, sequence in enumerate(sampling)}


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
