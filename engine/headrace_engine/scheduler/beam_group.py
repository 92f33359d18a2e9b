"""Runs the beams of one request as sequences that share blocks.

All beams advance in the same step: a beam that has its candidates is blocked until all others have
theirs. They are also started and preempted in the same step, so that none waits for another that
cannot run.
"""

from ..core.outputs import SequenceOutput, TokenLogprobs
from ..core.request import Sequence, State
from .beam_search import Beam, BeamSearch, BeamStep
from .sequence_group import SequenceGroup
from .state import SchedulerState


class BeamRun:
    """One beam search over sequences of the scheduler.

    The answer is the `count` best hypotheses, with the `logprobs` most likely tokens of each
    position (none of them if `logprobs` is None). The engine samples a token for each beam as for
    any sequence; the search replaces it by its own choice.
    """

    def __init__(
        self,
        state: SchedulerState,
        group: SequenceGroup,
        search: BeamSearch,
        count: int,
        logprobs: int | None,
    ) -> None:
        self._state = state
        self._group = group
        self._search = search
        self._count = count
        self._logprobs = logprobs
        (first,) = group.sequences
        self._beams = {first: Beam()}
        self._offers: dict[Sequence, TokenLogprobs] = {}
        self._cached_tokens = 0

    def take(self, output: SequenceOutput) -> list[SequenceOutput]:
        """Takes a beam's candidates. Returns the answer once the search is over, else nothing."""
        state, sequences = self._state, self._group.sequences
        sequence = next(each for each in sequences if each.choice == output.choice)
        assert output.logprobs, "beams are sampled with log probabilities"
        sequence.token_ids.pop()
        self._offers[sequence] = output.logprobs[0]
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        del state.decoding[sequence]
        state.blocked[sequence] = None
        # A preempted beam is not blocked: it computes its candidates again.
        if any(each not in state.blocked for each in sequences):
            return []
        return self._advance(sequences.copy())

    def _advance(self, sequences: list[Sequence]) -> list[SequenceOutput]:
        steps = self._search.advance(
            [self._beams[each] for each in sequences], [self._offers[each] for each in sequences]
        )
        self._offers.clear()
        if not steps:
            return self._end()
        children: dict[Sequence, list[BeamStep]] = {}
        for step in steps:
            children.setdefault(sequences[step.parent], []).append(step)
        for sequence in sequences:
            if sequence not in children:
                del self._beams[sequence]
                self._state.finish(self._group, sequence)
        for parent, own in children.items():
            for step in own[1:]:
                self._fork(parent, step)
            self._extend(parent, own[0])
        return []

    def _fork(self, parent: Sequence, step: BeamStep) -> None:
        used = {each.choice for each in self._group.sequences}
        number = next(each for each in range(self._search.width) if each not in used)
        beam = self._beams[parent]
        child = Sequence(parent.request, number, [*parent.token_ids, step.token])
        child.cached_tokens = parent.cached_tokens
        self._state.kv.branch(parent, child)
        child.transition(State.RUNNING)
        self._beams[child] = Beam(
            [*beam.tokens, step.token], [*beam.logprobs, step.logprobs], step.score
        )
        self._group.sequences.append(child)
        self._state.unfinished += 1
        self._state.decoding[child] = None

    def _extend(self, sequence: Sequence, step: BeamStep) -> None:
        sequence.token_ids.append(step.token)
        beam = self._beams[sequence]
        beam.tokens.append(step.token)
        beam.logprobs.append(step.logprobs)
        beam.score = step.score
        del self._state.blocked[sequence]
        self._state.decoding[sequence] = None

    def _end(self) -> list[SequenceOutput]:
        self._state.policy.finished(self._group.sequences[0])
        for sequence in self._group.sequences.copy():
            self._state.finish(self._group, sequence)
        return [
            SequenceOutput(
                request_id=self._group.request.request_id,
                choice=choice,
                index=0,
                token_ids=found.tokens,
                logprobs=self._shown(found.logprobs),
                finish_reason=found.stop.reason,
                stop_token=found.stop.token,
                cached_tokens=self._cached_tokens,
            )
            for choice, found in enumerate(self._search.finished[: self._count])
        ]

    def _shown(self, entries: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprobs, ...] | None:
        count = self._logprobs
        if count is None:
            return None
        return tuple(
            TokenLogprobs(entry.logprob, entry.rank, entry.top[:count]) for entry in entries
        )
