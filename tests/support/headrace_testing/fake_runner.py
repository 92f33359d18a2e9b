"""A runner without a model, which checks what a scheduler must get right about KV blocks.

Its "KV" of a position is (token, position, digest of all tokens up to there, of the cache salt and
of the adapter). In each step it
makes the step's copies, writes the computed positions, and then looks up every position of each
scheduled sequence through its block table: an aliased, stale or wrongly cached block shows at once.
A recurrent state is such a value in each of its blocks. All states are read before any is written,
and no block that is read may be written for another sequence.
The next token is a hash of seed, choice and all tokens so far, so tests can predict a run.
"""

from collections.abc import Sequence as Tokens
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from zlib import crc32

import numpy as np
import numpy.typing as npt

from headrace_engine.core.config import SleepLevel
from headrace_engine.core.images import ImageLimits
from headrace_engine.core.kv_cache_groups import KVGroups
from headrace_engine.core.outputs import SampledToken, TokenLogprobs
from headrace_engine.core.pooler_config import PoolerConfig
from headrace_engine.core.request import PENDING, EngineRequest, FinishReason, Sequence, State
from headrace_engine.core.step_plan import SampleRow, ScheduledSequence, SchedulerOutput, StepResult
from headrace_engine.kv_cache.shared_kv_cache import SharedKVCache
from headrace_engine.scheduler.beam_search import Beam, BeamSearch, Hypothesis
from headrace_engine.scheduler.stop_checker import Stop, StopRule
from headrace_engine.speculative.draft_proposer import Drafter
from headrace_engine.speculative.head_proposer import DraftingHead

from .fake_grammar import allowed_tokens, allows, refused_tokens

_MASK = 2**62 - 1
# A recurrent state in the format of KV.
_STATE = -7
# Adapters that the runner accepts; they do not change its tokens.
ADAPTERS = ("a", "b", "c")

Blocks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FakeHostKVCache:
    num_blocks: int
    bytes_per_block: int = 1000


class FakeRunner:
    """Stands in for the model runner. `min_tokens` masks end tokens as the real sampler does.

    The results of a step claim `prompt_seconds` for each token of a run longer than one, and
    `block_seconds` for each block copied from or to host memory. If both are 0 they claim no time.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 50,
        max_model_len: int = 128,
        eos_token_ids: frozenset[int] = frozenset({0}),
        num_host_blocks: int = 0,
        prompt_seconds: float = 0.0,
        block_seconds: float = 0.0,
        kv_groups: KVGroups | None = None,
        async_scheduling: bool = False,
    ) -> None:
        self.kv_groups = kv_groups or KVGroups()
        self.async_scheduling = async_scheduling
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.pooler_config: PoolerConfig | None = None
        self.draft_model: Drafter | None = None
        self.draft_head: DraftingHead | None = None
        self.adapters = frozenset(ADAPTERS)
        self.image_limits: ImageLimits | None = None
        self.steps: list[SchedulerOutput] = []
        self.sleep_level = 0
        self.shared_kv_cache: SharedKVCache | None = None
        self.host_kv_cache = FakeHostKVCache(num_host_blocks) if num_host_blocks else None
        self._prompt_seconds = prompt_seconds
        self._block_seconds = block_seconds
        self._submitted: FakeStep | None = None
        # Sequences whose last token became known only when the step began.
        self.late: set[Sequence] = set()
        self._kv = np.full((num_blocks, block_size, 3), -1, dtype=np.int64)
        self._host = np.full((num_host_blocks, block_size, 3), -1, dtype=np.int64)
        # For blocks that hold a state: the block's index within the state, and the value.
        self._states: dict[int, tuple[int, int]] = {}
        # The tokens of each encoded image.
        self._encoded: dict[bytes, int] = {}

    @property
    def capacity(self) -> int:
        """The most positions that its blocks can hold for a sequence."""
        return self.kv_groups.capacity(self.num_blocks, self.block_size)

    def execute(self, scheduler_output: SchedulerOutput) -> StepResult:
        assert not self.sleep_level, "a step of a runner that sleeps"
        check_scheduler_output(scheduler_output)
        self.steps.append(scheduler_output)
        _copy(self._kv, self._host, scheduler_output.swap_out)
        _copy(self._host, self._kv, scheduler_output.swap_in)
        for block in scheduler_output.zeroed:
            self._kv[block] = -1
        _copy(self._kv, self._kv, scheduler_output.copies)
        if self.kv_groups.state:
            self._advance_states(scheduler_output)
        self._encode(scheduler_output)
        for item in scheduler_output.scheduled:
            self._write(item)
        # A device may make these copies at any time during the step.
        _copy(self._kv, self._host, scheduler_output.saves)
        for item in scheduler_output.scheduled:
            self._check(item)
        sampling = [item for item in scheduler_output.scheduled if item.samples]
        sampled = tuple(self._new_tokens(item) for item in sampling)
        seconds, swapping = self._seconds(scheduler_output)
        scored = tuple(_scores(item) for item in scheduler_output.scheduled if item.scores)
        return StepResult(sampled, seconds=seconds, swap_seconds=swapping, scored=scored)

    def sleep(self, level: SleepLevel) -> None:
        """Loses all KV on the device."""
        self.sleep_level = level
        self._kv.fill(-1)
        self._states.clear()
        self._submitted = None

    def wake_up(self) -> None:
        self.sleep_level = 0

    def buffers(self, block: int) -> list[memoryview]:
        """The memory of a host block."""
        return [memoryview(self._host[block].reshape(-1).view(np.uint8))]

    def submit(self, scheduler_output: SchedulerOutput) -> "FakeStep":
        """Computes the step only when its result is requested: as late as a device may be."""
        self._submitted = FakeStep(
            self, scheduler_output, self._submitted if scheduler_output.ahead else None
        )
        return self._submitted

    def _seconds(self, scheduler_output: SchedulerOutput) -> tuple[float, float]:
        """Seconds of the step and of its copies from and to host memory."""
        swapping = self._block_seconds * (
            len(scheduler_output.swap_out) + len(scheduler_output.swap_in)
        )
        prompt = sum(
            item.length
            for item in scheduler_output.scheduled
            if item.length > 1 or not item.samples
        )
        return self._prompt_seconds * prompt + swapping, swapping

    def _new_tokens(self, item: ScheduledSequence) -> tuple[SampledToken, ...]:
        """Returns the tokens after the known ones, up to the first that differs from its draft."""
        sequence, tokens = item.sequence, list(item.sequence.token_ids)
        known = len(tokens)
        if sequence.request.grammar is not None:
            self._check_grammar(item)
        for draft in (*item.drafts, None):
            tokens.append(self.token_after(sequence.request, sequence.choice, tokens))
            if tokens[-1] != draft:
                break
        if sequence.request.logprobs is None:
            return tuple(map(SampledToken, tokens[known:]))
        return tuple(
            SampledToken(tokens[end], self.token_logprobs(sequence.request, tokens[: end + 1]))
            for end in range(known, len(tokens))
        )

    def _check_grammar(self, item: ScheduledSequence) -> None:
        """Checks that the sequence's grammar cursor allows exactly the tokens that may follow its
        output."""
        sequence = item.sequence
        known = len(sequence.token_ids) - (sequence in self.late)
        following = *sequence.token_ids[known:], *item.drafts
        first = len(sequence.token_ids) - known
        rows = tuple(
            SampleRow(sequence, following[:count], known)
            for count in range(first, len(following) + 1)
        )
        output = sequence.token_ids[sequence.prompt_length :]
        for count, found in enumerate(allowed_tokens(rows, self.vocab_size)):
            drafts = item.drafts[:count]
            if drafts and not allows(output, drafts[-1]):
                return
            output = [*output, *drafts[-1:]]
            wanted = {*range(self.vocab_size)}.difference(refused_tokens(output, self.vocab_size))
            # End tokens are refused until there are `min_tokens`.
            assert found <= wanted and wanted - found <= {*sequence.request.params.stop_token_ids}

    def token_logprobs(self, request: EngineRequest, tokens: Tokens[int]) -> TokenLogprobs:
        """Log probabilities of the last of `tokens`; they depend on the tokens before it."""
        logprobs, ranked = _distribution(self.vocab_size, kv_values(tokens[:-1])[-1][2] % 997)
        last = tokens[-1]
        top = tuple((token, logprobs[token]) for token in ranked[: request.logprobs])
        return TokenLogprobs(logprobs[last], ranked.index(last) + 1, top)

    def expected_beams(self, request: EngineRequest) -> list[Hypothesis]:
        """The results of beam search in an undisturbed run, best first."""
        params, prompt = request.params, request.prompt_token_ids
        limit = min(self.max_model_len, self.capacity) - len(prompt)
        rule = StopRule.of(params, self.eos_token_ids, limit)
        search = BeamSearch(params.branches, rule, params.length_penalty, params.early_stopping)
        widened = replace(request, candidates=search.candidates)
        beams = [Beam()]
        while True:
            offers = [self.token_logprobs(widened, (*prompt, *beam.tokens, 0)) for beam in beams]
            steps = search.advance(beams, offers)
            if not steps:
                return search.finished[: params.n]
            beams = [
                Beam(
                    [*beams[step.parent].tokens, step.token],
                    [*beams[step.parent].logprobs, step.logprobs],
                    step.score,
                )
                for step in steps
            ]

    def expected_best(self, request: EngineRequest) -> list[tuple[int, ...]]:
        """The outputs that `best_of` chooses, best first."""
        params = request.params
        widened = replace(request, params=replace(params, n=params.branches, logprobs=0))

        def score(choice: int) -> float:
            known, output = request.prompt_token_ids, self.expected(widened, choice)[0]
            return sum(
                self.token_logprobs(widened, (*known, *output[: end + 1])).logprob
                for end in range(len(output))
            )

        ranked = sorted(range(params.branches), key=lambda choice: -score(choice))
        return [self.expected(widened, choice)[0] for choice in ranked[: params.n]]

    def next_token(self, sequence: Sequence) -> int:
        return self.token_after(sequence.request, sequence.choice, sequence.token_ids)

    def token_after(self, request: EngineRequest, choice: int, tokens: Tokens[int]) -> int:
        """The token that the fake model generates after `tokens` (prompt and output) in this
        choice."""
        masked: set[int] = set()
        if len(tokens) - len(request.prompt_token_ids) < request.params.min_tokens:
            masked.update(request.params.stop_token_ids)
            masked.update(() if request.params.ignore_eos else self.eos_token_ids)
        if request.grammar is not None:
            output = tokens[len(request.prompt_token_ids) :]
            masked.update(refused_tokens(output, self.vocab_size))
        salt = 0
        while (token := self._draw((request.seed, choice, salt, *tokens))) in masked:
            salt += 1
        return token

    def expected(self, request: EngineRequest, choice: int) -> tuple[tuple[int, ...], Stop]:
        """All output tokens of a choice in an undisturbed run, and its finish reason."""
        params, prompt = request.params, list(request.prompt_token_ids)
        limit = min(self.max_model_len, self.capacity)
        tokens = list(prompt)
        while True:
            token = self.token_after(request, choice, tokens)
            tokens.append(token)
            output = tuple(tokens[len(prompt) :])
            may_stop = len(output) > params.min_tokens
            if may_stop and not params.ignore_eos and token in self.eos_token_ids:
                return output, Stop(FinishReason.STOP)
            if may_stop and token in params.stop_token_ids:
                return output, Stop(FinishReason.STOP, token)
            if len(output) == params.max_tokens or len(tokens) == limit:
                return output, Stop(FinishReason.LENGTH)

    def _draw(self, numbers: tuple[int, ...]) -> int:
        digest = blake2b(repr(numbers).encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") % self.vocab_size

    def _write(self, item: ScheduledSequence) -> None:
        values = sequence_values(item)
        for table in self._tables(item.sequence):
            for position in range(item.start, item.start + item.length + len(item.drafts)):
                slot = table[position // self.block_size], position % self.block_size
                self._kv[slot] = values[position]

    def _encode(self, scheduler_output: SchedulerOutput) -> None:
        """Checks that the embeddings of every run's images are there, and none too many."""
        for digest in scheduler_output.dropped:
            del self._encoded[digest]
        for image in scheduler_output.encoded:
            assert image.span.digest not in self._encoded, "an image is encoded twice"
            self._encoded[image.span.digest] = image.span.length
        room = 0 if self.image_limits is None else self.image_limits.tokens
        assert sum(self._encoded.values()) <= room, "too many images are kept"
        for item in scheduler_output.scheduled:
            for image in item.sequence.request.images:
                span, end = image.span, item.start + item.length
                read = span.start < end and span.end > item.start
                assert not read or span.digest in self._encoded, "an image is not encoded"

    def _advance_states(self, scheduler_output: SchedulerOutput) -> None:
        """Checks the states before the runs and writes those after them, and snapshots."""
        read: dict[int, Sequence] = {}
        written: dict[int, tuple[int, int]] = {}
        owners: dict[int, Sequence] = {}
        for item in scheduler_output.scheduled:
            sequence, start, size = item.sequence, item.start, self.kv_groups.state
            values = sequence_values(item)
            source = sequence.state_source or sequence.state_blocks
            if start:
                found = [self._states.get(block) for block in source]
                wanted = [(index, values[start - 1][2]) for index in range(size)]
                assert found == wanted, (
                    f"{sequence.request.request_id}/{sequence.choice}: not the state after {start}"
                )
                read |= dict.fromkeys(source, sequence)
            end = start + item.length + len(item.drafts)
            taken = [each for each in sequence.snapshots if start < each[0] <= end]
            for position, blocks in [*taken, (end, sequence.state_blocks)]:
                assert len(blocks) == size, "a state has not its blocks"
                for index, block in enumerate(blocks):
                    assert block not in written, "two states are written into one block"
                    written[block] = index, values[position - 1][2]
                    owners[block] = sequence
        for block, owner in owners.items():
            assert read.get(block, owner) is owner, "a state is overwritten before it is read"
        for item in scheduler_output.scheduled:
            new = set(item.sequence.block_table[item.start // self.block_size :])
            assert not new & (read.keys() | written.keys()), "KV is written over a state"
        for block, value in written.items():
            self._states[block] = value
            self._kv[block] = _STATE

    def _check(self, item: ScheduledSequence) -> None:
        sequence, end = item.sequence, item.start + item.length + len(item.drafts)
        rows, groups = -(-end // self.block_size), self.kv_groups
        assert len(sequence.block_table) == rows * groups.count, "not the blocks that tokens need"
        assert end < self.max_model_len, "nothing follows the last token of the context"
        held: list[int] = []
        wanted = np.array(sequence_values(item)[:end])
        for group, table in enumerate(self._tables(sequence)):
            slides = group >= groups.full
            held += table[sequence.released if slides else 0 :]
            assert not (self._kv[table] == _STATE).any(), "KV was not zeroed after a state"
            first = groups.first_seen(item.start) if slides else 0
            found = self._kv[table].reshape(-1, 3)[:end]
            wrong = np.flatnonzero((found != wanted).any(axis=1))
            wrong = wrong[wrong >= first]
            assert not len(wrong), (
                f"{sequence.request.request_id}/{sequence.choice}: position {wrong[0]} of group "
                f"{group} holds {found[wrong[0]]}, not {wanted[wrong[0]]}"
            )
        assert len(set(held)) == len(held), "a block stands twice in one table"

    def _tables(self, sequence: Sequence) -> list[list[int]]:
        """The block table of each group."""
        count = self.kv_groups.count
        return [sequence.block_table[group::count] for group in range(count)]


class FakeStep:
    """A submitted step. It computes the sequences as they were when it was submitted, except that
    the tokens of the step `before` are filled in."""

    def __init__(
        self, runner: FakeRunner, scheduler_output: SchedulerOutput, before: "FakeStep | None"
    ) -> None:
        self._runner = runner
        self._before = before
        self._sequences = [item.sequence for item in scheduler_output.scheduled if item.samples]
        self._originals = [item.sequence for item in scheduler_output.scheduled]
        frozen = [
            item._replace(sequence=_frozen(item.sequence)) for item in scheduler_output.scheduled
        ]
        self._scheduler_output = replace(scheduler_output, scheduled=tuple(frozen))
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        if self._result is None:
            self._take_tokens()
            self._result = self._runner.execute(self._scheduler_output)
            self._runner.late.clear()
        return self._result

    def _take_tokens(self) -> None:
        before, self._before = self._before, None
        chosen = {} if before is None else before.tokens()
        for original, item in zip(self._originals, self._scheduler_output.scheduled, strict=True):
            if item.sequence.token_ids[-1] == PENDING:
                item.sequence.token_ids[-1] = chosen[original]
                self._runner.late.add(item.sequence)

    def tokens(self) -> dict[Sequence, int]:
        found = zip(self._sequences, self.result().sampled, strict=True)
        return {sequence: tokens[-1].token_id for sequence, tokens in found if tokens is not None}


def _frozen(sequence: Sequence) -> Sequence:
    if sequence.request.grammar is not None and sequence.grammar_cursor is None:
        sequence.grammar_cursor = sequence.request.grammar.cursor()
    copied = copy(sequence)
    copied.token_ids = sequence.token_ids.copy()
    copied.block_table = sequence.block_table.copy()
    return copied


def expected_scores(request: EngineRequest) -> tuple[TokenLogprobs, ...]:
    """Log probabilities of a prompt; each is made of its position and its token."""
    tokens = request.prompt_token_ids
    return tuple(TokenLogprobs(-float(tokens[at]), at, ()) for at in range(1, len(tokens)))


def _scores(item: ScheduledSequence) -> tuple[TokenLogprobs, ...]:
    return expected_scores(item.sequence.request)[item.start : item.start + item.scores]


@cache
def _distribution(size: int, number: int) -> tuple[list[float], list[int]]:
    """Log probabilities by token, and the tokens, most likely first."""
    logits = np.arange(size) * 2654435761 % 1009 * (number + 1) % 1013 / 50.0
    logprobs = (logits - np.log(np.exp(logits).sum())).tolist()
    return logprobs, sorted(range(size), key=lambda token: -logprobs[token])


def _copy(source: Blocks, destination: Blocks, pairs: tuple[tuple[int, int], ...]) -> None:
    if pairs:
        sources, destinations = np.array(pairs).T
        destination[destinations] = source[sources]


def check_scheduler_output(scheduler_output: SchedulerOutput) -> None:
    """Asserts what every SchedulerOutput promises."""
    assert scheduler_output.scheduled or scheduler_output.saves, "an empty step"
    assert scheduler_output.num_tokens == sum(
        item.length + len(item.drafts) for item in scheduler_output.scheduled
    )
    sequences = [item.sequence for item in scheduler_output.scheduled]
    assert len(set(sequences)) == len(sequences), "a sequence is scheduled twice"
    sources = {source for source, _ in scheduler_output.copies}
    destinations = [destination for _, destination in scheduler_output.copies]
    assert len(set(destinations)) == len(destinations), "two copies into one block"
    assert sources.isdisjoint(destinations), "copies depend on their order"
    to_host = (*scheduler_output.swap_out, *scheduler_output.saves)
    for moves in (to_host, scheduler_output.swap_in):
        assert len({to for _, to in moves}) == len(moves), "two copies into one block"
    for item in scheduler_output.scheduled:
        known = len(item.sequence.token_ids)
        assert item.sequence.state is State.RUNNING
        assert item.length > 0 and item.start == item.sequence.num_computed_tokens
        assert item.samples == (item.start + item.length == known)
        assert item.samples or not item.drafts, "drafts following tokens that are not run"


def sequence_values(item: ScheduledSequence) -> list[tuple[int, int, int]]:
    """The values of a run and of all positions before it."""
    request = item.sequence.request
    seed = crc32(repr((request.cache_salt, request.lora)).encode())
    seen = [*item.sequence.token_ids, *item.drafts]
    for image in request.images:
        span = image.span
        seen[span.start : span.end] = [crc32(span.digest, at) for at in range(span.length)]
    return kv_values(seen, seed)


def kv_values(tokens: Tokens[int], digest: int = 17) -> list[tuple[int, int, int]]:
    values = []
    for position, token in enumerate(tokens):
        digest = (digest * 6364136223846793005 + token + 1442695040888963407) & _MASK
        values.append((token, position, digest))
    return values
