"""The filter of cached blocks: gateways that follow it believe what the pools have."""

from collections.abc import Sequence

import pytest

from headrace_common.protocol.kv_events import BlockFilter
from headrace_common.sampling.params import SamplingParams
from headrace_common.wire.block_hashes import block_hash, prefix_seed
from headrace_engine.core.request import EngineRequest
from headrace_engine.engine.engine import Engine
from headrace_engine.kv_cache.cached_blocks import CachedBlocks
from headrace_testing.engine import make_config, make_request
from headrace_testing.fake_runner import FakeRunner

SIZE = 4
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


class Follower:
    """An engine, and what is believed of its cache."""

    def __init__(self, *, num_blocks: int = 8, host: int = 0) -> None:
        runner = FakeRunner(
            num_blocks=num_blocks,
            num_host_blocks=host,
            block_size=SIZE,
            prompt_seconds=1.0,
            block_seconds=0.01,
        )
        self.engine = Engine(make_config(), runner)
        cached = self.engine.follow_cached_blocks()
        assert cached is not None
        self.cached: CachedBlocks = cached
        self.filter = BlockFilter(cached.bits, SIZE)

    def run(self, request: EngineRequest) -> None:
        self.engine.add_request(request)
        while self.engine.has_work:
            self.engine.step()
        self.follow()

    def follow(self) -> None:
        changes = self.cached.take_changes()
        assert not self.cached.has_changes
        self.filter.change(
            [bit for bit, is_set in changes.items() if is_set],
            [bit for bit, is_set in changes.items() if not is_set],
        )

    def believed(self, prompt: Sequence[int], salt: bytes = b"") -> int:
        """The number of leading blocks that are believed to be cached."""
        before, found = prefix_seed(salt, None), 0
        for begin in range(0, len(prompt) - SIZE + 1, SIZE):
            before = block_hash(before, prompt, (), begin, begin + SIZE)
            if not self.filter.may_have(before):
                break
            found += 1
        return found


def prompt(first: int, length: int = 17) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def test_the_blocks_of_a_prompt_are_believed_once_it_was_computed() -> None:
    follower = Follower()
    assert follower.believed(prompt(1)) == 0
    follower.run(make_request("a", prompt(1), params=ONE))
    assert follower.believed(prompt(1)) == 4
    assert follower.believed((*prompt(1, 8), *prompt(30))) == 2, "they part after two blocks"
    assert follower.believed(prompt(1), salt=b"another tenant") == 0


def test_evicted_blocks_are_no_longer_believed() -> None:
    follower = Follower()
    follower.run(make_request("a", prompt(1), params=ONE))
    follower.run(make_request("b", prompt(20, 30), params=ONE))
    assert follower.believed(prompt(1)) == 0
    assert follower.believed(prompt(20, 30)) == 7


def test_blocks_in_host_memory_are_believed() -> None:
    follower = Follower(host=64)
    follower.run(make_request("a", prompt(1), params=ONE))
    follower.run(make_request("b", prompt(20, 30), params=ONE))
    assert follower.believed(prompt(1)) == 4


def test_a_bit_is_set_until_the_last_block_with_it_is_gone() -> None:
    cached, same = CachedBlocks(10), (b"\1" * 32, b"\1" * 31 + b"\2")
    for block in same:
        cached.add(block)
    assert list(cached.take_changes().values()) == [True]
    cached.remove(same[0])
    assert cached.take_changes() == {}
    cached.remove(same[1])
    cached.add(same[0])
    cached.remove(same[0])
    assert list(cached.take_changes().values()) == [False]
    cached.add(b"\1" * 33)
    assert not cached.has_changes, "keys of states and of further groups are longer"


@pytest.mark.parametrize("caching", [True, False])
def test_an_engine_that_sleeps_has_nothing_on_its_device(caching: bool) -> None:
    runner = FakeRunner(num_blocks=8, block_size=SIZE)
    engine = Engine(make_config(enable_prefix_caching=caching), runner)
    cached = engine.follow_cached_blocks()
    assert (cached is None) != caching
    engine.add_request(make_request("a", prompt(1), params=ONE))
    while engine.has_work:
        engine.step()
    if cached is not None:
        assert set(cached.take_changes().values()) == {True}
        engine.sleep(1)
        assert set(cached.take_changes().values()) == {False}
