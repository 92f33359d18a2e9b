"""The free blocks of a pool, in order."""

from headrace_engine.kv_cache.block_pool import BlockPool


def free_blocks(pool: BlockPool) -> list[int]:
    """Returns the free blocks in the order in which they will be allocated."""
    order = []
    block = pool._next[pool.num_blocks]
    while block != pool.num_blocks:
        order.append(block)
        block = pool._next[block]
    return order
