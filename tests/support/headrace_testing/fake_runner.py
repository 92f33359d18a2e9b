"""A runner without a model, which checks what a scheduler must get right about KV blocks.

Its "KV" of a position is (token, position, digest of all tokens up to there). Each step it makes
the plan's copies, writes what the plan computes, and then looks up every position of each
scheduled sequence through its block table: an aliased, stale or wrongly cached block shows at once.
The next token is a hash of seed, choice and all tokens so far, so a run can be foretold.
"""

from collections.abc import Sequence as Tokens
from hashlib import blake2b

import numpy as np

from headrace_engine.outputs import SampledToken
from headrace_engine.plan import ScheduledSequence, StepPlan, StepResult
from headrace_engine.request import EngineRequest, FinishReason, Sequence, State
from headrace_engine.stopping import Stop

_MASK = 2**62 - 1


class FakeRunner:
    """Stands in for the model runner. `min_tokens` masks end tokens as the real sampler does."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 50,
        max_model_len: int = 128,
        eos_token_ids: frozenset[int] = frozenset({0}),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.steps: list[StepPlan] = []
        self._kv = np.full((num_blocks, block_size, 3), -1, dtype=np.int64)

    def execute(self, plan: StepPlan) -> StepResult:
        check_plan(plan)
        self.steps.append(plan)
        if plan.copies:
            sources, destinations = np.array(plan.copies).T
            self._kv[destinations] = self._kv[sources]
        for item in plan.scheduled:
            self._write(item)
        for item in plan.scheduled:
            self._check(item)
        sampling = [item.sequence for item in plan.scheduled if item.samples]
        return StepResult(tuple(SampledToken(self.next_token(seq)) for seq in sampling))

    def next_token(self, sequence: Sequence) -> int:
        return self.token_after(sequence.request, sequence.choice, sequence.token_ids)

    def token_after(self, request: EngineRequest, choice: int, tokens: Tokens[int]) -> int:
        """The fake model: what follows `tokens` (prompt and output) in this choice."""
        masked: set[int] = set()
        if len(tokens) - len(request.prompt_token_ids) < request.params.min_tokens:
            masked.update(request.params.stop_token_ids)
            masked.update(() if request.params.ignore_eos else self.eos_token_ids)
        salt = 0
        while (token := self._draw((request.seed, choice, salt, *tokens))) in masked:
            salt += 1
        return token

    def expected(self, request: EngineRequest, choice: int) -> tuple[tuple[int, ...], Stop]:
        """All output tokens of a choice in a run that nothing disturbs, and why it ends."""
        params, prompt = request.params, list(request.prompt_token_ids)
        limit = min(self.max_model_len, self.num_blocks * self.block_size)
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
        table = item.sequence.block_table
        values = kv_values(item.sequence.token_ids)
        for position in range(item.start, item.start + item.length):
            slot = table[position // self.block_size], position % self.block_size
            self._kv[slot] = values[position]

    def _check(self, item: ScheduledSequence) -> None:
        sequence, end = item.sequence, item.start + item.length
        table = sequence.block_table
        assert len(table) == -(-end // self.block_size), "more or fewer blocks than tokens need"
        assert len(set(table)) == len(table), "a block stands twice in one table"
        found = self._kv[table].reshape(-1, 3)[:end]
        wanted = np.array(kv_values(sequence.token_ids)[:end])
        wrong = np.flatnonzero((found != wanted).any(axis=1))
        assert not len(wrong), (
            f"{sequence.request.request_id}/{sequence.choice}: position {wrong[0]} holds "
            f"{found[wrong[0]]}, not {wanted[wrong[0]]}"
        )


def check_plan(plan: StepPlan) -> None:
    """Asserts what a step plan promises, whatever the scheduler."""
    assert plan.scheduled, "an empty plan"
    assert plan.num_tokens == sum(item.length for item in plan.scheduled)
    sequences = [item.sequence for item in plan.scheduled]
    assert len(set(sequences)) == len(sequences), "a sequence is scheduled twice"
    sources = {source for source, _ in plan.copies}
    destinations = [destination for _, destination in plan.copies]
    assert len(set(destinations)) == len(destinations), "two copies into one block"
    assert sources.isdisjoint(destinations), "copies depend on their order"
    for item in plan.scheduled:
        known = len(item.sequence.token_ids)
        assert item.sequence.state is State.RUNNING
        assert item.length > 0 and item.start == item.sequence.computed
        assert item.samples == (item.start + item.length == known)


def kv_values(tokens: Tokens[int]) -> list[tuple[int, int, int]]:
    values, digest = [], 17
    for position, token in enumerate(tokens):
        digest = (digest * 6364136223846793005 + token + 1442695040888963407) & _MASK
        values.append((token, position, digest))
    return values
