"""Prefixes in host memory and in the shared tier: what is kept, found again, and waited for.

The fake runner makes the copies and checks the KV of each position in each step. Real copies and
real files: `tests/test_engine/model_runner/test_prefix_tiers_served.py`.
"""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.request import EngineRequest, Sequence
from headrace_engine.kv_cache.shared_kv_cache import LONGEST, PAUSE
from headrace_engine.scheduler.policies import Fcfs
from headrace_engine.scheduler.scheduler import Scheduler
from headrace_testing.engine import Rig, limits_of, make_config, make_request
from headrace_testing.fake_runner import FakeRunner
from headrace_testing.shared_kv import ManualTier, MemoryStore

SIZE = 4
PROMPT = range(1, 18)  # four full blocks, and a token whose logits are always computed
CHEAP, DEAR = 0.01, 100.0


def make_runner(num_blocks: int, host: int, block_seconds: float) -> FakeRunner:
    """Prompt tokens take a second each, so that `block_seconds` decides."""
    return FakeRunner(
        num_blocks=num_blocks,
        num_host_blocks=host,
        block_size=SIZE,
        prompt_seconds=1.0,
        block_seconds=block_seconds,
    )


def host_rig(
    *, num_blocks: int = 8, host: int = 64, block_seconds: float = CHEAP, budget: int = 64
) -> Rig:
    runner = make_runner(num_blocks, host, block_seconds)
    return Rig(runner, make_config(max_num_batched_tokens=budget))


class SharedRig(Rig):
    """A Rig with a shared tier, whose jobs run before each step unless `held`."""

    def __init__(
        self, store: MemoryStore, *, num_blocks: int = 8, host: int = 64, most_writing: int = 1000
    ) -> None:
        runner = make_runner(num_blocks, host, CHEAP)
        self.tier = ManualTier(runner, store, 1000, most_writing)
        self.held = False
        runner.shared_kv_cache = self.tier.cache
        super().__init__(runner, make_config())

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if not self.held:
                self.tier.jobs.run()
            scheduler_output = self.scheduler.schedule()
            if scheduler_output is None:
                self.scheduler.wait_for_work()
                continue
            result = self.runner.execute(scheduler_output)
            self.outputs += self.scheduler.update(scheduler_output, result)

    def finish(self) -> None:
        super().finish()
        self.tier.jobs.run()
        assert self.scheduler.schedule() is None


def computed(rig: Rig, request_id: str) -> int:
    """The number of prompt tokens that were computed for a request."""
    return sum(
        item.length
        for scheduler_output in rig.runner.steps
        for item in scheduler_output.scheduled
        if item.sequence.request.request_id == request_id and item.start < 17
    )


def run(rig: Rig, *requests: EngineRequest) -> None:
    rig.add(*requests)
    rig.finish()
    found, expected = rig.tokens(), rig.expected(*requests)
    assert {key: found[key] for key in expected} == expected


def fill(rig: Rig, names: Iterable[str]) -> None:
    """Runs other requests, which take all blocks of the device."""
    for name in names:
        run(rig, make_request(name, [ord(name) - 70] * 24, params=SamplingParams(max_tokens=1)))


def test_an_evicted_prefix_comes_back_from_host_memory() -> None:
    rig = host_rig()
    run(rig, make_request("first", PROMPT))
    fill(rig, "ab")
    run(rig, make_request("again", PROMPT))
    assert computed(rig, "again") == 1, "only the last token of the prompt"
    stats = rig.scheduler.stats()
    assert (stats.host_hit_tokens, stats.shared_hit_tokens) == (16, 0)
    assert stats.prefix_hit_tokens == 16 and stats.swap_in_bytes == 4 * 1000
    assert stats.host_blocks_used == 0, "kept blocks count as free"
    assert rig.outputs[-1].cached_tokens == 16


def test_without_host_memory_an_evicted_prefix_is_computed_again() -> None:
    rig = host_rig(host=0)
    run(rig, make_request("first", PROMPT))
    fill(rig, "ab")
    run(rig, make_request("again", PROMPT))
    assert computed(rig, "again") == 17


def test_the_least_recently_used_prefix_leaves_host_memory() -> None:
    rig = host_rig(host=12)
    run(rig, make_request("first", PROMPT))
    fill(rig, "abcdefg")
    run(rig, make_request("again", PROMPT))
    assert computed(rig, "again") == 17


def test_a_prefix_in_use_stays_in_host_memory() -> None:
    rig = host_rig(host=24)
    for turn in range(6):
        run(rig, make_request(f"turn {turn}", PROMPT))
        fill(rig, (chr(ord("a") + 2 * turn), chr(ord("b") + 2 * turn)))
    assert [computed(rig, f"turn {turn}") for turn in range(6)] == [17, 1, 1, 1, 1, 1]


def test_tenants_do_not_find_each_others_prefixes() -> None:
    rig = host_rig()
    run(rig, make_request("first", PROMPT, cache_salt=b"a"))
    fill(rig, "ab")
    run(rig, make_request("other", PROMPT, cache_salt=b"b"))
    assert computed(rig, "other") == 17


def test_prompts_whose_log_probabilities_are_asked_for_are_computed() -> None:
    rig = host_rig()
    run(rig, make_request("first", PROMPT))
    fill(rig, "ab")
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    run(rig, make_request("again", PROMPT, params=params))
    assert computed(rig, "again") == 17


def test_policies_know_that_a_prefix_in_host_memory_is_not_computed() -> None:
    asked: list[int] = []

    class Recording(Fcfs):
        def refusal(self, sequence: Sequence, tokens: int) -> str | None:
            asked.append(tokens)
            return None

    rig = Rig(make_runner(8, 64, CHEAP), make_config(), Recording())
    run(rig, make_request("first", PROMPT))
    fill(rig, "ab")
    run(rig, make_request("again", PROMPT))
    assert (asked[0], asked[-1]) == (17, 1)


def test_prefixes_dearer_to_copy_than_to_compute_are_computed() -> None:
    rig = host_rig(block_seconds=DEAR)
    run(rig, make_request("first", PROMPT))
    fill(rig, "ab")
    run(rig, make_request("second", PROMPT))
    assert computed(rig, "second") == 17, "copies to host memory have shown what it costs"
    copied = rig.scheduler.stats().swap_out_bytes
    fill(rig, "cd")
    assert rig.scheduler.stats().swap_out_bytes - copied < 12 * 1000, "not all is saved any more"


def test_a_prompt_in_chunks_begins_with_what_is_in_host_memory() -> None:
    rig = host_rig(budget=3)
    run(rig, make_request("first", PROMPT))
    fill(rig, "ab")
    run(rig, make_request("again", PROMPT))
    assert computed(rig, "again") == 1


def test_a_preempted_sequence_finds_its_evicted_blocks_in_host_memory() -> None:
    rig = host_rig(num_blocks=7, host=64, block_seconds=CHEAP)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = [make_request(name, [k] * 8, params=params) for k, name in enumerate("ab", 1)]
    run(rig, *requests)
    stats = rig.scheduler.stats()
    assert stats.swaps + stats.preemptions > 0


def test_choices_share_a_prefix_from_host_memory() -> None:
    rig = host_rig(num_blocks=12)
    run(rig, make_request("first", PROMPT))
    fill(rig, "abc")
    run(rig, make_request("again", PROMPT, params=SamplingParams(n=3, max_tokens=3)))
    assert computed(rig, "again") <= 1 + 3 * 3


def test_another_engine_finds_what_was_computed() -> None:
    store = MemoryStore()
    run(SharedRig(store), make_request("first", PROMPT))
    second = SharedRig(store)
    run(second, make_request("again", PROMPT))
    assert computed(second, "again") == 1
    stats = second.scheduler.stats()
    assert (stats.host_hit_tokens, stats.shared_hit_tokens) == (0, 16)
    assert stats.shared is not None
    assert (stats.shared.blocks_hit, stats.shared.bytes_in) == (4, 4000)


def test_a_resumed_request_fetches_what_the_dead_engine_computed() -> None:
    store, params = MemoryStore(), SamplingParams(max_tokens=20, ignore_eos=True)
    request = make_request("r", PROMPT, params=params)
    first = SharedRig(store, num_blocks=16)
    first.add(request)
    first.step(12)
    first.tier.jobs.run()
    done = first.tokens()["r", 0]
    second = SharedRig(store, num_blocks=16)
    run(second, make_request("r", PROMPT, params=params, resume=(done,)))
    again = second.runner.steps[0].scheduled[0]
    assert again.start == (17 + len(done) - 2) // SIZE * SIZE, "all but the last block or two"


def test_the_last_blocks_of_an_idle_engine_are_written() -> None:
    store = MemoryStore()
    rig = SharedRig(store)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    run(rig, make_request("first", PROMPT, params=params))
    assert len(store.blocks) == (17 + 7) // SIZE
    assert not rig.scheduler.has_work


def test_a_block_is_written_once() -> None:
    store = MemoryStore()
    rig = SharedRig(store)
    for turn in range(3):
        run(rig, make_request(f"turn {turn}", PROMPT, params=SamplingParams(max_tokens=1)))
        fill(rig, (chr(ord("a") + 2 * turn), chr(ord("b") + 2 * turn)))
    stats = rig.scheduler.stats().shared
    assert stats is not None
    assert stats.bytes_out == 1000 * len(store.blocks)


def test_blocks_beyond_the_bound_are_not_written() -> None:
    rig = SharedRig(MemoryStore(), most_writing=2)
    rig.held = True
    rig.add(make_request("first", PROMPT, params=SamplingParams(max_tokens=1)))
    rig.tier.jobs.run()
    Rig.finish(rig)
    assert rig.scheduler.schedule() is None
    stats = rig.scheduler.stats().shared
    assert stats is not None and stats.blocks_skipped == 2
    assert len(rig.tier.jobs) == 2
    assert rig.scheduler.stats().host_blocks_used == 2, "those that are being written"


def test_other_requests_run_while_one_waits_for_its_kv() -> None:
    store = MemoryStore()
    run(SharedRig(store), make_request("first", PROMPT))
    rig = SharedRig(store)
    rig.held = True
    rig.add(make_request("waits", PROMPT))
    rig.add(make_request("short", [9, 9], arrival=1.0))
    rig.step()
    assert [name for name, _, _ in rig.shape()] == ["short"]
    rig.held = False
    rig.finish()
    assert computed(rig, "waits") == 1


def test_a_request_does_not_wait_longer_than_its_time() -> None:
    store = MemoryStore()
    run(SharedRig(store), make_request("first", PROMPT))
    rig = SharedRig(store)
    rig.held = True
    request = make_request("late", PROMPT)
    rig.add(request)
    rig.step()
    assert not rig.runner.steps
    rig.tier.now = LONGEST + 1.0
    rig.step()
    assert rig.shape() == [("late", 0, 17)]
    rig.held = False
    rig.finish()
    assert rig.tokens() == rig.expected(request)
    assert rig.scheduler.stats().host_blocks_used == 0


@pytest.mark.parametrize("bad", [0, 2])
def test_blocks_after_a_damaged_one_are_computed(bad: int) -> None:
    store = MemoryStore()
    run(SharedRig(store), make_request("first", PROMPT))
    rig = SharedRig(store)
    request = make_request("again", PROMPT)
    rig.add(request)
    sequence = Sequence(request, 0, list(PROMPT))
    store.lost.add(rig.scheduler.kv_cache.block_hash(sequence, bad))
    rig.finish()
    assert rig.tokens() == rig.expected(request)
    assert computed(rig, "again") == 17 - bad * SIZE


def test_requests_with_one_prefix_read_it_once() -> None:
    store = MemoryStore()
    run(SharedRig(store), make_request("first", PROMPT))
    rig = SharedRig(store, num_blocks=32)
    run(rig, *(make_request(name, PROMPT) for name in "abc"))
    stats = rig.scheduler.stats().shared
    assert stats is not None and stats.bytes_in == 4000
    assert [computed(rig, name) for name in "abc"] == [1, 1, 1]


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing() -> None:
    store = MemoryStore()
    run(SharedRig(store), make_request("first", PROMPT))
    rig = SharedRig(store)
    rig.held = True
    rig.add(make_request("gone", PROMPT, params=SamplingParams(n=2, max_tokens=2)))
    rig.scheduler.abort("gone", 0)
    rig.scheduler.abort("gone")
    assert not rig.scheduler.has_work
    rig.held = False
    run(rig, make_request("next", [9, 9]))
    assert rig.scheduler.stats().host_blocks_used == 0


def test_a_store_that_fails_is_left_alone_for_some_time() -> None:
    class Full(MemoryStore):
        tried = 0

        def write(self, block_hash: bytes, buffers: object) -> None:
            self.tried += 1
            raise OSError("no space left on device")

    store = Full()
    rig = SharedRig(store)
    run(rig, make_request("first", PROMPT))
    assert store.tried == 1
    fill(rig, "a")
    assert store.tried == 1
    rig.tier.now = PAUSE + 1.0
    fill(rig, "b")
    assert store.tried == 2
    assert rig.scheduler.stats().host_blocks_used == 0


def test_adapters_have_no_shared_tier() -> None:
    store = MemoryStore()
    rig = SharedRig(store)
    config = replace(make_config(), enable_lora=True)
    rig.scheduler = Scheduler(config, limits_of(rig.runner), Fcfs(), rig.runner.shared_kv_cache)
    run(rig, replace(make_request("adapted", PROMPT), lora="a"))
    assert not store.blocks
    run(rig, make_request("plain", PROMPT))
    assert store.blocks


@pytest.mark.parametrize("others", [0, 3])
def test_the_tier_has_all_full_blocks_when_it_says_so(others: int) -> None:
    """Also if nothing else runs and the request has ended meanwhile."""
    store, written = MemoryStore(), list[int]()
    rig = SharedRig(store, num_blocks=32)
    for number in range(others):
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        rig.add(make_request(f"other {number}", range(30, 36 + number), params=params))
    rig.add(make_request("first", PROMPT, params=SamplingParams(max_tokens=2, ignore_eos=True)))
    while not rig.tokens().get(("first", 0)):
        rig.step()
    rig.held = True
    hashes = set(rig.scheduler.kv_cache.pool.hashes) - {None}

    tiers = rig.scheduler.prefix_tiers
    assert tiers is not None
    tiers.call_when_shared(lambda: written.append(len(hashes - store.blocks.keys())))

    assert written == [] and len(store.blocks) < len(hashes)
    rig.held = False
    rig.finish()
    assert written == [0]
