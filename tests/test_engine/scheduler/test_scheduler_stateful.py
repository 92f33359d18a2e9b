"""The scheduler and its blocks under random arrivals, aborts, preemptions, drafts, images, policies
and tiers of the prefix cache.

Hypothesis drives an engine with a pool so small that sequences preempt each other. The fake runner
checks each step's KV, recurrent states and encoded images; the invariants check the block counts
between steps. Time is simulated. Not covered: the real runner.
"""

from collections import Counter
from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.errors import RequestError
from headrace_engine.core.images import ImageLimits, PromptImage
from headrace_engine.core.kv_cache_groups import KVGroups
from headrace_engine.core.outputs import SequenceOutput
from headrace_engine.core.request import EngineRequest, FinishReason, Sequence, State
from headrace_engine.core.step_plan import SchedulerOutput
from headrace_engine.engine.step_pipeline import StepPipeline
from headrace_engine.scheduler.policies import POLICIES, make_policy
from headrace_engine.scheduler.scheduler import Scheduler
from headrace_testing.engine import limits_of, prompt_image
from headrace_testing.fake_grammar import fake_grammar
from headrace_testing.fake_runner import ADAPTERS, FakeRunner, expected_scores
from headrace_testing.free_blocks import free_blocks
from headrace_testing.shared_kv import ManualTier, MemoryStore

SHARED = tuple(range(1, 25))
SALTS = (b"", b"tenant-a", b"tenant-b")
TENANTS = ("a", "b", "c")
# Short ages and margins, so that a run covers all behaviour of a policy.
OPTIONS: dict[str, dict[str, object]] = {
    "priority": {"ageing": 4.0},
    "fair": {"weights": {"b": 3.0}},
    "deadline": {"margin": 0.5, "horizon": 50.0},
}
Choice = tuple[str, int]
# Different images in the same place, and the same one in different places.
IMAGES = [
    prompt_image(name, start, length)
    for name, start, length in (("a", 2, 4), ("b", 2, 4), ("c", 9, 3), ("c", 12, 3), ("d", 5, 8))
]


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, EngineRequest] = {}
        self.outputs: dict[Choice, list[int]] = {}
        self.aborted: set[Choice] = set()
        self.ended: set[Choice] = set()
        self.scored: set[str] = set()
        self.count = 0
        self.now = 0.0

    @initialize(
        rows=st.integers(10, 24),
        block_size=st.sampled_from([1, 3, 4]),
        budget=st.sampled_from([2, 7, 16, 64]),
        max_num_seqs=st.integers(1, 6),
        caching=st.booleans(),
        watermark=st.sampled_from([0.0, 0.1]),
        policy=st.sampled_from(sorted(POLICIES)),
        num_host_blocks=st.sampled_from([40, 40, 5, 0]),
        block_seconds=st.sampled_from([0.01, 0.1, 3.0]),
        most_drafts=st.sampled_from([0, 2, 9]),
        window=st.sampled_from([None, None, 1, 6, 11]),
        chunked=st.booleans(),
        kinds=st.sampled_from([(0, 1), (1, 1), (1, 3), (2, 1)]),
        state=st.sampled_from([0, 0, 1, 3]),
        max_loras=st.sampled_from([None, 1, 2]),
        pipelined=st.booleans(),
        shared=st.booleans(),
        jobs_a_step=st.sampled_from([None, 1, 0]),
        image_room=st.sampled_from([None, 4, 9]),
        image_budget=st.sampled_from([None, 1, 5]),
    )
    def start(
        self,
        rows: int,
        block_size: int,
        budget: int,
        max_num_seqs: int,
        caching: bool,
        watermark: float,
        policy: str,
        num_host_blocks: int,
        block_seconds: float,
        most_drafts: int,
        window: int | None,
        chunked: bool,
        kinds: tuple[int, int],
        state: int,
        max_loras: int | None,
        pipelined: bool,
        shared: bool,
        jobs_a_step: int | None,
        image_room: int | None,
        image_budget: int | None,
    ) -> None:
        self.most_drafts = most_drafts
        if state:  # with layers that keep one window, or all positions
            kinds = (1, 0) if window is None else (0, 1)
        groups = KVGroups(state=state)
        if window is not None:
            groups = KVGroups(*kinds, window, state, chunked)
        num_host_blocks = num_host_blocks if groups.count == 1 and not groups.state else 0
        self.runner = FakeRunner(
            num_blocks=rows * groups.count + groups.state,
            block_size=block_size,
            max_model_len=60,
            num_host_blocks=num_host_blocks,
            prompt_seconds=1.0,
            block_seconds=block_seconds,
            kv_groups=groups,
        )
        if image_room is not None:
            self.runner.image_limits = ImageLimits(images=2, tokens=image_room, room=image_room)
        self.jobs_a_step = jobs_a_step
        self.tier: ManualTier | None = None
        if shared and num_host_blocks and window is None:
            self.tier = ManualTier(self.runner, MemoryStore(), 1000, most_writing=8)
            self.runner.shared_kv_cache = self.tier.cache
        self.config = EngineConfig(
            model="fake",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            watermark=watermark,
            enable_lora=max_loras is not None,
            max_loras=max_loras or 1,
            max_num_encoder_input_tokens=image_budget,
        )
        self.max_loras = max_loras
        self.pipelined = pipelined
        self.grammar = fake_grammar(self.runner.vocab_size)
        self.policy = policy
        self.make_scheduler()
        self.max_running = min(max_num_seqs, budget)
        self.rows, self.capacity = rows, self.runner.capacity

    def make_scheduler(self) -> None:
        policy = make_policy(self.policy, OPTIONS.get(self.policy, {}), lambda: self.now)
        self.scheduler = Scheduler(
            self.config, limits_of(self.runner), policy, self.runner.shared_kv_cache
        )
        self.pipeline = StepPipeline(self.scheduler, self.runner.submit)

    @precondition(lambda self: self.tier and not self.scheduler.has_work and not self.pipeline.busy)
    @rule()
    def replace_the_engine(self) -> None:
        """Another engine takes the place of an idle one, with the same shared tier."""
        assert self.tier is not None
        self.tier.jobs.run()
        old = self.runner
        self.runner = FakeRunner(
            num_blocks=old.num_blocks,
            block_size=old.block_size,
            max_model_len=old.max_model_len,
            num_host_blocks=0 if old.host_kv_cache is None else old.host_kv_cache.num_blocks,
            kv_groups=old.kv_groups,
        )
        self.runner.image_limits = old.image_limits
        self.tier = ManualTier(self.runner, self.tier.store, 1000, most_writing=8)
        self.runner.shared_kv_cache = self.tier.cache
        self.make_scheduler()

    @precondition(lambda self: self.tier and self.tier.store.blocks)
    @rule(data=st.data(), damaged=st.booleans())
    def lose_a_shared_block(self, data: st.DataObject, damaged: bool) -> None:
        assert self.tier is not None
        store = self.tier.store
        block_hash = data.draw(st.sampled_from(sorted(store.blocks)))
        if damaged:
            store.lost.add(block_hash)
        else:
            del store.blocks[block_hash]

    @rule(
        shared=st.integers(0, 24),
        own=st.lists(st.integers(1, 49), min_size=1, max_size=8),
        salt=st.sampled_from(SALTS),
        n=st.sampled_from([1, 1, 2, 3, 8]),
        max_tokens=st.one_of(st.none(), st.integers(1, 16)),
        min_tokens=st.integers(0, 3),
        resumed=st.lists(st.integers(0, 12), min_size=8, max_size=8),
        late=st.integers(0, 3),
        priority=st.integers(-2, 2),
        tenant=st.sampled_from(TENANTS),
        timeout=st.one_of(st.just(inf), st.integers(0, 30)),
        search=st.sampled_from(["", "", "", "best_of", "beams"]),
        structured=st.booleans(),
        lora=st.sampled_from([None, *ADAPTERS]),
        images=st.lists(st.sampled_from(IMAGES), max_size=2),
    )
    def add(
        self,
        shared: int,
        own: list[int],
        salt: bytes,
        n: int,
        max_tokens: int | None,
        min_tokens: int,
        resumed: list[int],
        late: int,
        priority: int,
        tenant: str,
        timeout: float,
        search: str,
        structured: bool,
        lora: str | None,
        images: list[PromptImage],
    ) -> None:
        prompt = (*SHARED[:shared], *own)
        if len(prompt) + (max_tokens or 6) > min(self.capacity, 60):
            return
        request = replace(
            self.build(prompt, salt, n, max_tokens, min_tokens, late),
            priority=priority,
            tenant=tenant,
            deadline=self.now + timeout,
            lora=None if self.max_loras is None else lora,
            images=self.fitting(images, len(prompt)),
        )
        if structured and search != "beams":
            request = replace(request, grammar=self.grammar)
        if search:
            request = replace(request, params=searching(request.params, search, sum(resumed)))
        elif sum(resumed) % 3 == 0:
            request = self.resumed(request, resumed)
        elif sum(resumed) % 3 == 1:
            request = replace(request, params=replace(request.params, prompt_logprobs=0))
        if search == "beams" and not self.beams_fit(request):
            with pytest.raises(RequestError, match="beams"):
                self.scheduler.add(request)
            return
        self.requests[request.request_id] = request
        for choice in range(request.params.n):
            tokens = request.resume[choice] if request.resume else ()
            self.outputs[request.request_id, choice] = list(tokens)
        self.collect(self.scheduler.add(request))

    def fitting(self, images: list[PromptImage], length: int) -> tuple[PromptImage, ...]:
        """Those that a prompt may have, in order and apart."""
        limits, found = self.runner.image_limits, list[PromptImage]()
        for each in sorted(images, key=lambda image: image.span.start):
            apart = not found or each.span.start >= found[-1].span.end
            if limits and each.span.length <= limits.tokens and each.span.end < length and apart:
                found.append(each)
        return tuple(found)

    def build(
        self,
        prompt: tuple[int, ...],
        salt: bytes,
        n: int,
        max_tokens: int | None,
        min_tokens: int,
        late: int,
    ) -> EngineRequest:
        self.count += 1
        params = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens or min_tokens),
            stop_token_ids=(7,),
        )
        return EngineRequest(
            request_id=f"r{self.count}",
            prompt_token_ids=prompt,
            params=params,
            seed=self.count,
            arrival=self.now - late,
            cache_salt=salt,
        )

    def beams_fit(self, request: EngineRequest) -> bool:
        width, params = request.params.branches, request.params
        size, length = self.runner.block_size, len(request.prompt_token_ids)
        blocks = -(-(length + (params.max_tokens or 0)) // size)
        state = self.runner.kv_groups.state
        shared = (length - bool(state)) // size
        rows = self.rows + state - (width + 1) * state
        own = width * (blocks - shared)
        return width <= self.max_running and shared + own < rows

    def resumed(self, request: EngineRequest, lengths: list[int]) -> EngineRequest:
        """The request as another engine left it: each choice got some of its tokens, or all."""
        resume = tuple(
            self.runner.expected(request, choice)[0][: lengths[choice]]
            for choice in range(request.params.n)
        )
        return replace(request, resume=resume)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if not self.scheduler.has_work:
                return
            self.one_step()
            self.check_block_counts()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.abort_drawn(data)

    @precondition(lambda self: self.scheduler.has_work and not self.pipelined)
    @rule(data=st.data())
    def abort_while_the_step_runs(self, data: st.DataObject) -> None:
        scheduler_output = self.schedule()
        if scheduler_output is not None:
            result = self.runner.execute(scheduler_output)
            self.abort_drawn(data)
            self.collect(self.scheduler.update(scheduler_output, result))

    def abort_drawn(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        choices = range(self.requests[request_id].params.n)
        choice = data.draw(st.one_of(st.none(), st.sampled_from(choices)))
        self.scheduler.abort(request_id, choice)
        hit = choices if choice is None else (choice,)
        self.aborted.update((request_id, index) for index in hit)

    def one_step(self) -> None:
        if self.tier is not None:
            self.tier.jobs.run(self.jobs_a_step, Random(self.now))
            self.tier.now += 10.0
        if self.pipelined:
            self.now += 1.0
            self.collect(self.pipeline.step())
            return
        scheduler_output = self.schedule()
        if scheduler_output is not None:
            self.collect(
                self.scheduler.update(scheduler_output, self.runner.execute(scheduler_output))
            )

    def schedule(self) -> SchedulerOutput | None:
        """Schedules the next step, a second later; None if the policy ended all requests."""
        self.now += 1.0
        scheduler_output = self.scheduler.schedule(self.drafts())
        aborted_by_policy = self.scheduler.take_aborted_by_policy()
        tiers = self.scheduler.prefix_tiers
        waits = tiers is not None and (tiers.fetching or not self.scheduler.has_work)
        assert scheduler_output is not None or aborted_by_policy or waits, (
            "there is work, but nothing is scheduled"
        )
        assert scheduler_output is not None or waits or not self.scheduler.has_work
        self.collect(aborted_by_policy)
        return scheduler_output

    def drafts(self) -> dict[Sequence, tuple[int, ...]]:
        """Drafts for some decoding sequences; the first tokens of a draft are correct."""
        found = {}
        for sequence, room in self.scheduler.draftable():
            rng = Random(f"{self.now} {sequence.request.request_id} {sequence.choice}")
            count = rng.randint(0, min(self.most_drafts, room))
            right = rng.randint(0, count)
            tokens = sequence.token_ids.copy()
            for _ in range(right):
                follows = self.runner.token_after(sequence.request, sequence.choice, tokens)
                tokens.append(follows)
            tokens += [rng.randrange(50) for _ in range(count - right)]
            if count:
                found[sequence] = tuple(tokens[len(sequence.token_ids) :])
        return found

    def check_scores(self, output: SequenceOutput) -> None:
        """Checks that the prompt's log probabilities come completely, with the first tokens, and
        only once."""
        request = self.requests[output.request_id]
        wanted = request.params.prompt_logprobs is not None
        if output.token_ids and wanted and output.request_id not in self.scored:
            self.scored.add(output.request_id)
            assert output.prompt_logprobs == expected_scores(request)
        else:
            assert output.prompt_logprobs is None

    def collect(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            key = output.request_id, output.choice
            assert key not in self.ended and key not in self.aborted, "an output after the end"
            assert output.index == len(self.outputs[key]), "a token was lost or came twice"
            self.check_scores(output)
            self.outputs[key] += output.token_ids
            if output.finish_reason is not None:
                self.ended.add(key)
                if output.finish_reason is FinishReason.ABORT:
                    self.check_abort(output)
                    continue
                self.check_end(self.requests[key[0]], output)

    def check_end(self, request: EngineRequest, output: SequenceOutput) -> None:
        params, choice = request.params, output.choice
        tokens = tuple(self.outputs[output.request_id, choice])
        if params.use_beam_search:
            found = self.runner.expected_beams(request)[choice]
            assert (tokens, output.finish_reason) == (found.tokens, found.stop.reason)
            return
        if params.answers_at_end:
            assert tokens == self.runner.expected_best(request)[choice]
            return
        expected, stop = self.runner.expected(request, choice)
        assert tokens == expected
        assert (output.finish_reason, output.stop_token) == (stop.reason, stop.token)

    def check_abort(self, output: SequenceOutput) -> None:
        request = self.requests[output.request_id]
        assert self.policy == "deadline" and output.reason and not output.token_ids
        tokens = tuple(self.outputs[output.request_id, output.choice])
        expected = self.runner.expected(request, output.choice)[0]
        assert tokens == expected[: len(tokens)], "the partial output is not the request's"
        late = request.deadline - 0.5 <= self.now
        assert late or "not begun" in output.reason, "ended before its time"

    @invariant()
    def block_counts_are_right(self) -> None:
        if hasattr(self, "scheduler"):
            self.check_block_counts()

    def check_block_counts(self) -> None:
        pool, size = self.scheduler.kv_cache.pool, self.scheduler.kv_cache.block_size
        running = list(self.scheduler.running())
        assert len(running) <= self.max_running
        adapters = {sequence.request.lora for sequence in running} - {None}
        assert len(adapters) <= (self.max_loras or 0), "more adapters run than there are slots"
        blocks_of = self.scheduler.kv_cache.blocks_of
        references = Counter(block for sequence in running for block in blocks_of(sequence))
        states = self.scheduler.kv_cache.state
        references.update([] if states is None else states.unsettled)
        assert pool.ref_counts == [references[block] for block in range(pool.num_blocks)]
        assert pool.num_shared == sum(count > 1 for count in references.values())
        free = free_blocks(pool)
        assert sorted(free) == [b for b in range(pool.num_blocks) if not references[b]]
        assert pool.num_free == len(free)
        assert pool.num_cached == sum(pool.hashes[block] is not None for block in free)
        for block, block_hash in enumerate(pool.hashes):
            assert block_hash is None or pool.lookup(block_hash) == block
        for sequence in running:
            rows = len(sequence.block_table) / self.runner.kv_groups.count
            assert rows <= sequence.num_computed_tokens // size + 1, "more blocks than needed"
        self.check_salts(running)
        self.check_snapshot()
        self.check_host_block_counts()

    def check_snapshot(self) -> None:
        snapshot = self.scheduler.snapshot(3)
        stats, shown = snapshot.stats, snapshot.sequences
        assert len(shown) + snapshot.left_out == stats.running + stats.waiting + stats.swapped
        assert len(shown) <= 3
        running = [one for one in shown if one.phase in ("prefill", "decode")]
        assert len(running) == min(3, stats.running), "running sequences come first"
        for one in shown:
            assert 0 <= one.output <= one.max_output
            assert one.computed <= one.prompt + one.output + 1

    def check_host_block_counts(self) -> None:
        host = self.scheduler.host_block_tables
        swapped = list(self.scheduler.swapped())
        assert host is not None or not swapped
        if host is None:
            return
        references = Counter(block for seq in swapped for block in seq.host_blocks)
        references.update(host.unsettled)
        tiers = self.scheduler.prefix_tiers
        references.update([] if tiers is None else tiers.held_blocks)
        blocks = range(host.pool.num_blocks)
        assert host.pool.ref_counts == [references[block] for block in blocks]
        size = self.scheduler.kv_cache.block_size
        for sequence in swapped:
            assert sequence.state is State.SWAPPED and not sequence.block_table
            assert len(sequence.host_blocks) == -(-sequence.num_computed_tokens // size)

    def check_salts(self, running: list[Sequence]) -> None:
        salt_of: dict[int, tuple[bytes, str | None]] = {}
        for sequence in running:
            for block in sequence.block_table + sequence.state_blocks:
                salt = sequence.request.cache_salt, sequence.request.lora
                assert salt_of.setdefault(block, salt) == salt, "tenants or adapters share a block"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            self.one_step()
            self.check_block_counts()
        assert not self.scheduler.has_work, "the scheduler makes no progress"
        if self.pipeline.busy:
            self.collect(self.pipeline.step())
        stats = self.scheduler.stats()
        assert stats.blocks_used == stats.running == stats.waiting == stats.swapped == 0
        host = self.scheduler.host_block_tables
        if host is not None:
            if self.tier is not None:
                self.tier.jobs.run()
                assert self.scheduler.schedule() is None
            host.settle()
            assert host.pool.num_used == 0, "host blocks leak"
        assert self.ended | self.aborted == set(self.outputs)


def searching(params: SamplingParams, search: str, number: int) -> SamplingParams:
    """The parameters with a search that runs more choices than it returns: best_of or beams."""
    n = min(params.n, 3)
    width = n + number % 3
    if search == "best_of":
        return replace(params, n=n, best_of=width)
    return replace(
        params,
        n=n,
        best_of=width,
        use_beam_search=True,
        min_tokens=0,
        max_tokens=params.max_tokens or 6,
        early_stopping=(False, True, "never")[number % 3],
    )


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=100,
    stateful_step_count=25,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
