"""Requests that are answered once, at their end: `best_of` and beam search.

Their outputs are held back until it is known which of them are the answer. One that comes from
another engine begins anew, as its client has nothing yet.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from sys import maxsize

from .beam_search import BeamSearch
from .beams import BeamRun
from .best_of import BestOf
from .books import Books
from .errors import RequestError
from .group import Group, open_group
from .outputs import SequenceOutput
from .request import EngineRequest, FinishReason
from .stopping import StopRule
from .validation import Limits
from .waiting import Rank

# The search ends beams, whatever tokens the sampler would choose for them.
NEVER = StopRule(frozenset(), frozenset(), 0, maxsize)
# A step ranks the candidates of all beams on the host: more of them would hold up everybody.
MAX_CANDIDATES = 2**15
FAILURES = (FinishReason.ABORT, FinishReason.ERROR)


@dataclass(slots=True)
class _Held:
    """`muted` are choices of the answer that nobody wants any more."""

    count: int
    run: BestOf | BeamRun
    muted: set[int] = field(default_factory=set)


class HeldRequests:
    """Those of one scheduler, with what becomes of their outputs."""

    def __init__(self, books: Books, limits: Limits) -> None:
        self._books = books
        self._limits = limits
        self._held: dict[str, _Held] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def open(self, request: EngineRequest, key: Rank, rule: StopRule) -> Group:
        """The group of a request that is answered at its end; what it resumes from is dropped.

        Raises RequestError for more beams than could run together.
        """
        opened = self._open_beams if request.params.use_beam_search else self._open_best_of
        group, run = opened(request, key, rule)
        self._held[request.request_id] = _Held(request.params.n, run)
        return group

    def mute(self, request_id: str, choice: int) -> bool:
        """Holds back one choice of the answer for good; whether none is wanted any more."""
        held = self._held[request_id]
        held.muted.add(choice)
        return len(held.muted) >= held.count

    def forget(self, request_id: str) -> None:
        """The request ends without an answer."""
        self._held.pop(request_id, None)

    def sift(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        """Takes what belongs to held requests out of `outputs` and puts their answers in."""
        if not self._held:
            return outputs
        passed: list[SequenceOutput] = []
        ended: set[str] = set()
        for output in outputs:
            held = self._held.get(output.request_id)
            if held is not None:
                answer = self._take(held, output)
                if answer:
                    self.forget(output.request_id)
                    ended.add(output.request_id)
                passed += [each for each in answer if each.choice not in held.muted]
            elif output.request_id not in ended:
                passed.append(output)
        return passed

    def _take(self, held: _Held, output: SequenceOutput) -> Iterable[SequenceOutput]:
        if output.finish_reason not in FAILURES:
            return held.run.take(output)
        self._books.drop(output.request_id)
        return [
            output._replace(choice=choice, index=0, token_ids=(), logprobs=None)
            for choice in range(held.count)
        ]

    def _open_best_of(
        self, request: EngineRequest, key: Rank, rule: StopRule
    ) -> tuple[Group, BestOf | BeamRun]:
        params = request.params
        sampled = replace(params, n=params.branches, best_of=None, logprobs=params.logprobs or 0)
        group, _ = open_group(replace(request, params=sampled, resume=()), key, rule)
        return group, BestOf(params.branches, params.n, params.logprobs)

    def _open_beams(
        self, request: EngineRequest, key: Rank, rule: StopRule
    ) -> tuple[Group, BestOf | BeamRun]:
        params = request.params
        rule = self._bound(request, rule)
        search = BeamSearch(params.branches, rule, params.length_penalty, params.early_stopping)
        if search.candidates * search.width > MAX_CANDIDATES:
            raise RequestError(
                f"{search.width} beams with {len(params.stop_token_ids)} stop_token_ids come to "
                f"{search.candidates * search.width} candidates a step, but at most "
                f"{MAX_CANDIDATES} are allowed: ask for fewer beams or stop_token_ids"
            )
        sampled = replace(params, n=1, best_of=1, temperature=0.0)
        first = replace(request, params=sampled, resume=(), candidates=search.candidates)
        group, _ = open_group(first, key, NEVER)
        group.width = params.branches
        return group, BeamRun(self._books, group, search, params.n, params.logprobs)

    def _bound(self, request: EngineRequest, rule: StopRule) -> StopRule:
        """The rule, its length bounded so that all beams fit the KV cache by themselves.

        They share the prompt's full rows of blocks, and one is in use twice while it is copied.
        """
        width, limits = request.params.branches, self._limits
        if width > min(self._books.slots, limits.vocab_size):
            raise RequestError(
                f"{width} beams are asked for (best_of, or n), but at most "
                f"{min(self._books.slots, limits.vocab_size)} sequences run at once here: ask for "
                "fewer"
            )
        length = len(request.prompt_token_ids)
        shared = length // limits.block_size
        rows = shared + (limits.num_blocks // limits.kv_groups.count - 1 - shared) // width
        room = rows * limits.block_size - length
        if room < (request.params.max_tokens or 1):
            raise RequestError(
                f"{width} beams of {length} prompt tokens and max_tokens "
                f"{request.params.max_tokens} do not fit the KV cache together: ask for fewer "
                "beams or tokens"
            )
        return replace(rule, max_output=min(rule.max_output, room))
