import pytest

from headrace_engine.core.errors import ConfigError, OutOfBlocks
from headrace_engine.kv_cache.block_pool import BlockPool
from headrace_testing.free_blocks import free_blocks


def block_counts(pool: BlockPool) -> tuple[int, int, int]:
    """The numbers of used blocks, cached blocks and free blocks without content."""
    return pool.num_used, pool.num_cached, pool.num_free - pool.num_cached


def cached(pool: BlockPool, *hashes: bytes) -> list[int]:
    """Registers one block for each hash, then frees all in this order."""
    blocks = [pool.allocate() for _ in hashes]
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.register(block, block_hash)
    for block in blocks:
        pool.release(block)
    return blocks


def test_every_block_can_be_allocated_once() -> None:
    pool = BlockPool(3)
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    assert block_counts(pool) == (3, 0, 0)
    with pytest.raises(OutOfBlocks):
        pool.allocate()


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        BlockPool(0)


def test_a_block_is_free_when_its_last_reference_goes() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    assert pool.num_shared == 1
    pool.release(block)
    assert (*block_counts(pool), pool.num_shared) == (1, 0, 1, 0)
    pool.release(block)
    assert block_counts(pool) == (0, 0, 2)


def test_a_double_free_is_a_bug() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(block)


def test_cached_blocks_are_allocated_last_and_least_recently_used_first() -> None:
    pool = BlockPool(4)
    first, second = cached(pool, b"a", b"b")
    plain = pool.allocate()
    pool.release(plain)
    order = free_blocks(pool)
    assert order[0] == plain
    assert order[2:] == [first, second]


def test_a_cached_block_is_revived_from_the_middle_of_the_free_list() -> None:
    pool = BlockPool(3)
    _, middle, _ = cached(pool, b"a", b"b", b"c")
    pool.share(middle)
    assert block_counts(pool) == (1, 2, 0)
    assert pool.lookup(b"b") == middle
    assert middle not in free_blocks(pool)
    pool.release(middle)
    assert free_blocks(pool)[-1] == middle, "used again, so the last to be evicted"


def test_eviction_forgets_the_hash() -> None:
    pool = BlockPool(1)
    (block,) = cached(pool, b"a")
    assert pool.allocate() == block
    assert pool.lookup(b"a") is None
    assert pool.hashes[block] is None
    assert block_counts(pool) == (1, 0, 0)


def test_the_first_block_with_a_content_stays_the_cached_one() -> None:
    pool = BlockPool(2)
    one, two = pool.allocate(), pool.allocate()
    pool.register(one, b"a")
    pool.register(two, b"a")
    assert pool.lookup(b"a") == one
    pool.release(two)
    assert block_counts(pool) == (1, 0, 1)
    assert pool.lookup(b"a") == one


def test_a_forgotten_block_cannot_be_found() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.register(block, b"a")
    pool.forget(block)
    assert pool.lookup(b"a") is None
    pool.release(block)
    assert block_counts(pool) == (0, 0, 1)
