"""The unfinished choices of a request.

One choice, the leader, computes the prompt; the followers wait for it and then share its blocks. If
the leader ends before that, the next follower becomes the leader.
"""

from dataclasses import dataclass

from ..core.outputs import SequenceOutput, TokenLogprobs
from ..core.request import EngineRequest, Sequence, State
from .stop_checker import Stop, StopRule


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request and its `sequences`: the unfinished choices.

    `followers` are the sequences that wait for `leader`, which is None once none is left. `width`
    is the number of beams of a beam search; there may be more or fewer sequences at the moment.
    `prompt_logprobs` collects those of the prompt without its first token; it is None if the
    request asked for none, or once they were returned.
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
        """Adds the log probabilities of the tokens after position `start`; skips known ones."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += found[len(self.prompt_logprobs) - start :]

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Returns the prompt's log probabilities the first time, then None."""
        found, self.prompt_logprobs = self.prompt_logprobs, None
        return None if found is None else tuple(found)

    @property
    def co_scheduled(self) -> bool:
        """Whether all of its sequences must run at the same time (beams)."""
        return self.width > 1

    def next_leader(self) -> Sequence | None:
        """Makes the first follower the leader; None if there is no follower."""
        self.leader = self.followers.pop(0) if self.followers else None
        return self.leader

    def drop(self, sequence: Sequence) -> None:
        """Removes a finished choice."""
        self.sequences.remove(sequence)
        if sequence in self.followers:
            self.followers.remove(sequence)


def open_group(
    request: EngineRequest, key: tuple[float, ...], rule: StopRule
) -> tuple[SequenceGroup, list[SequenceOutput]]:
    """Makes the group of a request. Also returns the outputs of resumed choices that had ended."""
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
    group = SequenceGroup(request, key, rule, live, live.copy())
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
