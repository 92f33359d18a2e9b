"""Buffers the outputs of requests that are answered once, at their end: `best_of` and beam search.

If such a request comes from another engine it starts again, since its client has no tokens yet.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from sys import maxsize

from ..core.errors import RequestError
from ..core.outputs import SequenceOutput
from ..core.request import EngineRequest, FinishReason
from .beam_group import BeamRun
from .beam_search import BeamSearch
from .best_of import BestOf
from .input_validation import Limits
from .request_queue import Rank
from .sequence_group import SequenceGroup, open_group
from .state import SchedulerState
from .stop_checker import StopRule

# For beams: the search ends them, not their sampled tokens.
NEVER = StopRule(frozenset(), frozenset(), 0, maxsize)
# A step ranks the candidates of all beams on the host: more of them would delay all requests.
MAX_CANDIDATES = 2**15
FAILURES = (FinishReason.ABORT, FinishReason.ERROR)


@dataclass(slots=True)
class _BufferedRequest:
    """A request whose outputs are buffered. `muted` are the choices that its client cancelled."""

    count: int
    run: BestOf | BeamRun
    muted: set[int] = field(default_factory=set)


class BufferedOutputs:
    """The buffered requests of one scheduler."""

    def __init__(self, state: SchedulerState, limits: Limits) -> None:
        self._state = state
        self._limits = limits
        self._requests: dict[str, _BufferedRequest] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def open(self, request: EngineRequest, key: Rank, rule: StopRule) -> SequenceGroup:
        """Makes the sequence group of a request that is answered at its end, and ignores its
        `resume`.

        Raises RequestError for more beams than can run at once.
        """
        opened = self._open_beams if request.params.use_beam_search else self._open_best_of
        group, run = opened(request, key, rule)
        self._requests[request.request_id] = _BufferedRequest(request.params.n, run)
        return group

    def mute(self, request_id: str, choice: int) -> bool:
        """Cancels one choice of the answer; returns whether all choices are cancelled."""
        buffered = self._requests[request_id]
        buffered.muted.add(choice)
        return len(buffered.muted) >= buffered.count

    def forget(self, request_id: str) -> None:
        """Drops a request that ends without an answer."""
        self._requests.pop(request_id, None)

    def filter(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        """Replaces the outputs of buffered requests by their answers, where these are complete."""
        if not self._requests:
            return outputs
        passed: list[SequenceOutput] = []
        ended: set[str] = set()
        for output in outputs:
            buffered = self._requests.get(output.request_id)
            if buffered is not None:
                answer = self._take(buffered, output)
                if answer:
                    self.forget(output.request_id)
                    ended.add(output.request_id)
                passed += [each for each in answer if each.choice not in buffered.muted]
            elif output.request_id not in ended:
                passed.append(output)
        return passed

    def _take(self, buffered: _BufferedRequest, output: SequenceOutput) -> Iterable[SequenceOutput]:
        if output.finish_reason not in FAILURES:
            return buffered.run.take(output)
        self._state.drop(output.request_id)
        return [
            output._replace(choice=choice, index=0, token_ids=(), logprobs=None)
            for choice in range(buffered.count)
        ]

    def _open_best_of(
        self, request: EngineRequest, key: Rank, rule: StopRule
    ) -> tuple[SequenceGroup, BestOf | BeamRun]:
        params = request.params
        sampled = replace(params, n=params.branches, best_of=None, logprobs=params.logprobs or 0)
        group, _ = open_group(replace(request, params=sampled, resume=()), key, rule)
        return group, BestOf(params.branches, params.n, params.logprobs)

    def _open_beams(
        self, request: EngineRequest, key: Rank, rule: StopRule
    ) -> tuple[SequenceGroup, BestOf | BeamRun]:
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
        return group, BeamRun(self._state, group, search, params.n, params.logprobs)

    def _bound(self, request: EngineRequest, rule: StopRule) -> StopRule:
        """The stop rule with a length that lets all beams fit the KV cache if they run alone.

        Beams share the full rows of blocks of the prompt; copying a row needs one row more.
        """
        width, limits = request.params.branches, self._limits
        if width > min(self._state.slots, limits.vocab_size):
            raise RequestError(
                f"{width} beams are asked for (best_of, or n), but at most "
                f"{min(self._state.slots, limits.vocab_size)} sequences run at once here: ask for "
                "fewer"
            )
        length = len(request.prompt_token_ids)
        shared = (length - bool(limits.kv_groups.state)) // limits.block_size
        # Each beam has a state, and one that they share is read while they write theirs.
        blocks = limits.num_blocks - (width + 1) * limits.kv_groups.state
        rows = shared + (blocks // limits.kv_groups.count - 1 - shared) // width
        room = rows * limits.block_size - length
        if room < (request.params.max_tokens or 1):
            raise RequestError(
                f"{width} beams of {length} prompt tokens and max_tokens "
                f"{request.params.max_tokens} do not fit the KV cache together: ask for fewer "
                "beams or tokens"
            )
        return replace(rule, max_output=min(rule.max_output, room))
