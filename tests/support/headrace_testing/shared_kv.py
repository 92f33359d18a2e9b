"""A shared tier without threads and without a folder, for tests that decide when it works."""

from collections import deque
from collections.abc import Callable
from random import Random

from headrace_engine.kv_cache.block_folder import Buffers
from headrace_engine.kv_cache.shared_kv_cache import HostMemory, SharedKVCache


class MemoryStore:
    """Blocks by hash. `lost` hashes are found, but cannot be read."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, list[bytes]] = {}
        self.lost: set[bytes] = set()

    def has(self, block_hash: bytes) -> bool:
        return block_hash in self.blocks

    def read(self, block_hash: bytes, buffers: Buffers) -> bool:
        if block_hash in self.lost or block_hash not in self.blocks:
            buffers[0][:1] = b"x"  # a damaged file leaves its content in the buffer
            return False
        for buffer, content in zip(buffers, self.blocks[block_hash], strict=True):
            buffer[:] = content
        return True

    def write(self, block_hash: bytes, buffers: Buffers) -> None:
        self.blocks[block_hash] = [bytes(buffer) for buffer in buffers]


class Jobs:
    """Jobs that wait until the test runs them."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, job: Callable[[], None]) -> None:
        self._waiting.append(job)

    def run(self, count: int | None = None, order: Random | None = None) -> None:
        """Runs `count` jobs, or all, with those that they add; in a drawn order if there is one."""
        while self._waiting and count != 0:
            if order is not None:
                self._waiting.rotate(order.randrange(len(self._waiting)))
            self._waiting.popleft()()
            count = None if count is None else count - 1


class ManualTier:
    """A shared tier whose jobs and time the test controls."""

    def __init__(
        self,
        memory: HostMemory,
        store: MemoryStore,
        block_bytes: int,
        most_writing: int = 1000,
    ) -> None:
        self.store = store
        self.jobs = Jobs()
        self.now = 0.0
        self.cache = SharedKVCache(
            store,
            memory,
            block_bytes,
            most_writing=most_writing,
            reading=self.jobs.put,
            writing=self.jobs.put,
            clock=lambda: self.now,
        )
