from headrace_engine.core.request import Sequence
from headrace_engine.kv_cache.kv_cache_manager import KVCacheManager
from headrace_testing.engine import make_request
from headrace_testing.free_blocks import free_blocks


def sequence(length: int, salt: bytes = b"", request_id: str = "r") -> Sequence:
    prompt = tuple(range(1, length + 1))
    return Sequence(make_request(request_id, prompt, cache_salt=salt), 0, list(prompt))


def compute(cache: KVCacheManager, seq: Sequence, end: int) -> list[tuple[int, int]]:
    """Plans and records a run up to `end`; returns its copies."""
    copies: list[tuple[int, int]] = []
    start = seq.num_computed_tokens
    cache.extend(seq, end, copies)
    seq.num_computed_tokens = end
    cache.register(seq, start, end)
    return copies


def computed(cache: KVCacheManager, length: int, salt: bytes = b"") -> Sequence:
    seq = sequence(length, salt)
    compute(cache, seq, length)
    return seq


def test_a_sequence_holds_no_block_beyond_its_need() -> None:
    cache = KVCacheManager(8, 4)
    seq = sequence(9)
    for end, blocks in ((1, 1), (4, 1), (5, 2), (9, 3)):
        compute(cache, seq, end)
        assert len(seq.block_table) == blocks


def test_a_computed_prefix_is_found_again() -> None:
    cache = KVCacheManager(8, 4)
    first = computed(cache, 11)
    assert cache.match_prefix(sequence(11)) == first.block_table[:2]
    assert cache.match_prefix(sequence(7)) == first.block_table[:1]


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    cache = KVCacheManager(8, 4)
    first = computed(cache, 8)
    assert cache.match_prefix(sequence(8)) == first.block_table[:1]


def test_a_prefix_with_another_salt_is_not_found() -> None:
    cache = KVCacheManager(8, 4)
    computed(cache, 8, b"a")
    assert cache.match_prefix(sequence(8, b"b")) == []
    assert cache.match_prefix(sequence(8)) == []


def test_a_block_is_found_only_after_the_same_prefix() -> None:
    cache = KVCacheManager(8, 4)
    computed(cache, 9)
    other = sequence(9)
    other.token_ids[0] = 40
    assert cache.match_prefix(other) == []


def test_blocks_that_are_not_computed_are_not_found() -> None:
    cache = KVCacheManager(8, 4)
    cache.extend(sequence(9), 9, [])
    assert cache.match_prefix(sequence(9)) == []


def test_prefix_caching_can_be_off() -> None:
    cache = KVCacheManager(8, 4, prefix_caching=False)
    seq = computed(cache, 9)
    assert cache.match_prefix(sequence(9)) == []
    cache.free(seq)
    assert (cache.pool.num_free, cache.pool.num_cached) == (8, 0)


def test_freed_blocks_are_revived_with_their_tokens() -> None:
    cache = KVCacheManager(8, 4)
    first = computed(cache, 9)
    table = first.block_table
    cache.free(first)
    second = sequence(9)
    matched = cache.match_prefix(second)
    assert cache.blocks_to_start(second, matched) == 3, "revived blocks leave the free list"
    cache.start(second, matched)
    assert (second.block_table, second.num_computed_tokens) == (table[:2], 8)
    assert cache.pool.num_free == 6


def test_blocks_in_use_by_others_cost_nothing_to_admit() -> None:
    cache = KVCacheManager(8, 4)
    computed(cache, 9)
    second = sequence(9)
    assert cache.blocks_to_start(second, cache.match_prefix(second)) == 1


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    cache = KVCacheManager(3, 4)
    seq = computed(cache, 12)
    head, middle, tail = seq.block_table
    cache.free(seq)
    assert free_blocks(cache.pool) == [tail, middle, head]


def test_a_shared_last_block_is_copied_by_all_writers_but_the_last() -> None:
    cache = KVCacheManager(8, 4)
    parent, child = computed(cache, 6), sequence(6)
    cache.fork(parent, child, 6)
    assert child.num_computed_tokens == 5
    assert child.block_table == parent.block_table
    shared = parent.block_table[1]
    assert cache.needing_rows([parent, child]) == [parent, child]
    parent.token_ids.append(30)
    assert compute(cache, parent, 7) == [(shared, parent.block_table[1])]
    assert parent.block_table[1] != shared
    assert compute(cache, child, 6) == []
    assert child.block_table[1] == shared
    assert cache.pool.num_used == 3


def test_a_shared_full_block_is_copied_and_stays_cached() -> None:
    cache = KVCacheManager(8, 4)
    parent, child = computed(cache, 8), sequence(8)
    cache.fork(parent, child, 8)
    last = parent.block_table[1]
    assert compute(cache, child, 8) == [(last, child.block_table[1])]
    assert cache.match_prefix(sequence(9)) == parent.block_table


def test_a_cached_block_of_one_owner_leaves_the_cache_while_it_is_written() -> None:
    cache = KVCacheManager(8, 4)
    parent, child = computed(cache, 8), sequence(8)
    cache.fork(parent, child, 8)
    cache.free(parent)
    assert cache.needing_rows([child]) == [child]
    copies: list[tuple[int, int]] = []
    cache.extend(child, 8, copies)
    assert copies == []
    assert len(cache.match_prefix(sequence(9))) == 1
    cache.register(child, 7, 8)
    assert cache.match_prefix(sequence(9)) == child.block_table


def test_a_fork_shares_no_block_after_the_common_tokens() -> None:
    cache = KVCacheManager(8, 4)
    parent, child = computed(cache, 11), sequence(6)
    cache.fork(parent, child, 6)
    assert child.block_table == parent.block_table[:2]


def test_fit_returns_the_end_of_the_longest_run_that_fits() -> None:
    cache = KVCacheManager(3, 4)
    seq = sequence(20)
    assert cache.fit(seq, 20) == 12
    assert cache.fit(seq, 5) == 5
    compute(cache, seq, 12)
    assert cache.fit(seq, 20) == 12


def test_fit_counts_the_block_of_a_copy() -> None:
    cache = KVCacheManager(3, 4)
    parent, child = computed(cache, 6), sequence(9)
    cache.fork(parent, child, 6)
    assert cache.fit(child, 9) == 8
    other = sequence(1, b"other")
    cache.extend(other, 1, [])
    assert cache.fit(child, 9) == 6
