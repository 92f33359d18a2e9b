"""A request's choices while any of them is unfinished.

One choice, the leader, computes the prompt; the others follow: they wait until its prompt is there
and then share its blocks. A leader that is gone before that is succeeded by the next follower.
"""

from dataclasses import dataclass

from .outputs import SequenceOutput, TokenLogprobs
from .request import EngineRequest, Sequence, State
from .stopping import Stop, StopRule


@dataclass(slots=True, eq=False)
class Group:
    """`sequences` are the unfinished choices; `followers` those of them that wait for `leader`.

    `leader` is None once no choice follows any more. `width` is the number of beams of a beam
    search, which may be more or fewer than there are sequences just now. `prompt_logprobs`
    gathers those of the prompt but for its first token; None where none are wanted, or they were
    handed out.
    """

    request: EngineRequest
    key: tuple[float, ...]
    rule: StopRule
    sequences: list[Sequence]
    followers: list[Sequence]
    leader: Sequence | None = None
    width: int = 1
    prompt_logprobs: list[TokenLogprobs] | None = None

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of prompt tokens are still to be computed."""
        found = self.prompt_logprobs
        return found is not None and len(found) < len(self.request.prompt_token_ids) - 1

    def score(self, start: int, found: tuple[TokenLogprobs, ...]) -> None:
        """Takes those of the tokens behind position `start`; known ones are passed over."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += found[len(self.prompt_logprobs) - start :]

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Those of the whole prompt, once."""
        found, self.prompt_logprobs = self.prompt_logprobs, None
        return None if found is None else tuple(found)

    @property
    def together(self) -> bool:
        """Whether its sequences run all at once or not at all."""
        return self.width > 1

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
    group = Group(request, key, rule, live, live.copy())
    if request.params.prompt_logprobs is not None and not request.resume:
        group.prompt_logprobs = []
    return group, ended


def _ending(sequence: Sequence, stop: Stop) -> SequenceOutput:
    return SequenceOutput(
        request_id=sequence.request.request_id,
        choice=sequence.choice,
        index=sequence.output_length,
        token_ids=(),
        finish_reason=stop.reason,
        stop_token=stop.token,
    )
