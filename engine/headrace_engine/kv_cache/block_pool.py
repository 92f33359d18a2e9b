"""The pool of fixed-size KV blocks: reference counts, the free list and the prefix-hash map.

A block is an index below `num_blocks`. The pool knows nothing about tokens, sequences or tensors.

The free list is a doubly linked list stored in two flat lists (as vLLM's FreeKVCacheBlockQueue). A
cached block that is hit again must leave the middle of the list in O(1), which neither a deque nor
a heap can do. Flat lists need no object for a block.

    head                                                    tail
    blocks without content | cached blocks, least recently used first
    ^ allocated from here, so a cached block is evicted only when no other block is left
"""

from collections.abc import Callable, Iterator
from itertools import islice

from ..core.errors import ConfigError, OutOfBlocks
from .cached_blocks import CachedBlocks


class BlockPool:
    """A pool of blocks. A block is either used (`ref_counts[block]` > 0) or in the free list (0).

    `hashes[block]` is the content hash of a full, computed block. It stays when the block is freed,
    until the block is allocated again. Callers may read `ref_counts` and `hashes`, but not write
    them. `on_evicted` is called with a cached block and its hash before the block gets another
    content. `cached` hears of every block that gets or loses a hash.
    """

    __slots__ = (
        "_by_hash",
        "_next",
        "_prev",
        "cached",
        "hashes",
        "num_blocks",
        "num_cached",
        "num_free",
        "num_shared",
        "on_evicted",
        "ref_counts",
    )

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(
                f"num_blocks must be at least 1, not {num_blocks}: raise kv_cache_bytes"
            )
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_cached = 0
        self.num_shared = 0  # the number of blocks with several references
        self.ref_counts = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.on_evicted: Callable[[int, bytes], None] | None = None
        self.cached: CachedBlocks | None = None
        self._by_hash: dict[bytes, int] = {}
        # Circular, with a sentinel at index num_blocks, so that the ends need no special cases.
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self) -> int:
        """Takes a free block, with one reference and no hash. Evicts a cached block if it must.

        Raises OutOfBlocks if every block is used: callers check `num_free` first.
        """
        block = self._next[self.num_blocks]
        if block == self.num_blocks:
            raise OutOfBlocks(f"all {self.num_blocks} blocks are in use")
        self._take(block)
        block_hash = self.hashes[block]
        if block_hash is not None:
            if self.on_evicted is not None:
                self.on_evicted(block, block_hash)
            self.forget(block)
        return block

    def share(self, block: int) -> None:
        """Adds a reference. A cached block leaves the free list and keeps its hash."""
        count = self.ref_counts[block]
        if count > 0:
            self.ref_counts[block] = count + 1
            self.num_shared += count == 1
        else:
            self._take(block)

    def release(self, block: int) -> None:
        """Drops a reference. After the last one the block is free; it keeps its hash."""
        count = self.ref_counts[block] - 1
        assert count >= 0, f"block {block} was freed twice"
        self.ref_counts[block] = count
        if count > 0:
            self.num_shared -= count == 1
            return
        self.num_free += 1
        if self.hashes[block] is None:
            self._link_after(self.num_blocks, block)
        else:
            self.num_cached += 1
            self._link_after(self._prev[self.num_blocks], block)

    def lookup(self, block_hash: bytes) -> int | None:
        return self._by_hash.get(block_hash)

    def register(self, block: int, block_hash: bytes) -> bool:
        """Adds a used block to the prefix cache, unless one with the same content is there.

        Returns whether it was added.
        """
        assert self.ref_counts[block] > 0, f"block {block} is free and cannot be registered"
        known = self.hashes[block]
        assert known is None or known == block_hash, f"block {block} was overwritten while cached"
        if known is not None or block_hash in self._by_hash:
            return False
        self.hashes[block] = block_hash
        self._by_hash[block_hash] = block
        if self.cached is not None:
            self.cached.add(block_hash)
        return True

    def forget(self, block: int) -> None:
        """Removes a used block from the prefix cache, before its content changes."""
        block_hash = self.hashes[block]
        if block_hash is not None:
            self.hashes[block] = None
            del self._by_hash[block_hash]
            if self.cached is not None:
                self.cached.remove(block_hash)

    def forget_all(self) -> None:
        """Removes every block from the prefix cache, before all contents are lost. None is used."""
        assert self.num_free == self.num_blocks, "blocks are in use"
        for block_hash, block in self._by_hash.items():
            self.hashes[block] = None
            if self.cached is not None:
                self.cached.remove(block_hash)
        self._by_hash.clear()
        self.num_cached = 0

    def first_free(self, count: int) -> list[int]:
        """The free blocks that are allocated next, at most `count`."""
        return list(islice(self._free(), count))

    def _free(self) -> Iterator[int]:
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            yield block
            block = self._next[block]

    def _take(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.ref_counts[block] = 1
        self.num_free -= 1
        if self.hashes[block] is not None:
            self.num_cached -= 1

    def _link_after(self, before: int, block: int) -> None:
        after = self._next[before]
        self._prev[block] = before
        self._next[block] = after
        self._next[before] = block
        self._prev[after] = block
