"""A request's choices while any of them is unfinished.

One choice, the leader, computes the prompt; the others follow: they wait until its prompt is there
and then share its blocks. A leader that is gone before that is succeeded by the next follower.
"""

from dataclasses import dataclass

from .outputs import SequenceOutput
from .request import EngineRequest, Sequence, State
from .stopping import Stop, StopRule


@dataclass(slots=True, eq=False)
class Group:
    """`sequences` are the unfinished choices; `followers` those of them that wait for `leader`.

    `leader` is None once no choice follows any more.
    """

    request: EngineRequest
    key: tuple[float, ...]
    rule: StopRule
    sequences: list[Sequence]
    followers: list[Sequence]
    leader: Sequence | None = None

    def next_leader(self) -> Sequence | None:
        """Makes the first follower the leader; None where nobody follows."""
        self.leader = self.followers.pop(0) if self.followers else None
        return self.leader

    def drop(self, sequence: Sequence) -> None:
        """Forgets a finished choice."""
        self.sequences.remove(sequence)
        if sequence in self.followers:
            self.followers.remove(sequence)


def open_group(
    request: EngineRequest, key: tuple[float, ...], rule: StopRule
) -> tuple[Group, list[SequenceOutput]]:
    """The group of a request, and the last outputs of resumed choices that had already ended."""
    live: list[Sequence] = []
    ended: list[SequenceOutput] = []
    for choice in range(request.params.n):
        resumed = request.resume[choice] if request.resume else ()
        sequence = Sequence(request, choice, [*request.prompt_token_ids, *resumed])
        stop = rule.check(resumed[-1], len(resumed)) if resumed else None
        if stop is None:
            live.append(sequence)
        else:
            sequence.transition(State.FINISHED)
            ended.append(_ending(sequence, stop))
    return Group(request, key, rule, live, live.copy()), ended


def _ending(sequence: Sequence, stop: Stop) -> SequenceOutput:
    return SequenceOutput(
        request_id=sequence.request.request_id,
        choice=sequence.choice,
        index=sequence.output_length,
        token_ids=(),
        finish_reason=stop.reason,
        stop_token=stop.token,
    )
