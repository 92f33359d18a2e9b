"""The beams of one request as sequences that share blocks, step by step.

Beams go on together: one that has its candidates is parked until all have theirs. They start, give
way and come back together, too, so that none waits for another that cannot run.
"""

from .beam_search import Beam, BeamSearch, Step
from .books import Books
from .group import Group
from .outputs import SequenceOutput, TokenLogprobs
from .request import Sequence, State


class BeamRun:
    """`count` of the search's hypotheses are the answer, with the `logprobs` most likely tokens of
    each position, or None.

    The engine samples a token for each beam as for any sequence; the search takes it back and puts
    its own choice in its place.
    """

    def __init__(
        self, books: Books, group: Group, search: BeamSearch, count: int, logprobs: int | None
    ) -> None:
        self._books = books
        self._group = group
        self._search = search
        self._count = count
        self._logprobs = logprobs
        (first,) = group.sequences
        self._beams = {first: Beam()}
        self._offers: dict[Sequence, TokenLogprobs] = {}
        self._cached_tokens = 0

    def take(self, output: SequenceOutput) -> list[SequenceOutput]:
        """Takes a beam's candidates; the answer where these end the search."""
        books, sequences = self._books, self._group.sequences
        sequence = next(each for each in sequences if each.choice == output.choice)
        assert output.logprobs, "beams are sampled with log probabilities"
        sequence.token_ids.pop()
        self._offers[sequence] = output.logprobs[0]
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        del books.decoding[sequence]
        books.parked[sequence] = None
        # Of a beam that was preempted meanwhile the offer is void.
        if any(each not in books.parked for each in sequences):
            return []
        return self._advance(sequences.copy())

    def _advance(self, sequences: list[Sequence]) -> list[SequenceOutput]:
        steps = self._search.advance(
            [self._beams[each] for each in sequences], [self._offers[each] for each in sequences]
        )
        self._offers.clear()
        if not steps:
            return self._end()
        children: dict[Sequence, list[Step]] = {}
        for step in steps:
            children.setdefault(sequences[step.parent], []).append(step)
        for sequence in sequences:
            if sequence not in children:
                del self._beams[sequence]
                self._books.finish(self._group, sequence)
        for parent, own in children.items():
            for step in own[1:]:
                self._fork(parent, step)
            self._extend(parent, own[0])
        return []

    def _fork(self, parent: Sequence, step: Step) -> None:
        used = {each.choice for each in self._group.sequences}
        number = next(each for each in range(self._search.width) if each not in used)
        beam = self._beams[parent]
        child = Sequence(parent.request, number, [*parent.token_ids, step.token])
        child.cached_tokens = parent.cached_tokens
        self._books.kv.branch(parent, child)
        child.transition(State.RUNNING)
        self._beams[child] = Beam(
            [*beam.tokens, step.token], [*beam.logprobs, step.logprobs], step.score
        )
        self._group.sequences.append(child)
        self._books.unfinished += 1
        self._books.decoding[child] = None

    def _extend(self, sequence: Sequence, step: Step) -> None:
        sequence.token_ids.append(step.token)
        beam = self._beams[sequence]
        beam.tokens.append(step.token)
        beam.logprobs.append(step.logprobs)
        beam.score = step.score
        del self._books.parked[sequence]
        self._books.decoding[sequence] = None

    def _end(self) -> list[SequenceOutput]:
        self._books.policy.finished(self._group.sequences[0])
        for sequence in self._group.sequences.copy():
            self._books.finish(self._group, sequence)
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
