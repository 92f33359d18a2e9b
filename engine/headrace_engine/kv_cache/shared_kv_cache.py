"""The shared tier: KV blocks between host memory and a store that other engines use, too.

Threads read and write; the methods of `SharedKVCache` return at once. The caller owns the host
blocks, and changes none that is being read into or written from.
"""

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from queue import SimpleQueue
from threading import Condition, Event, Thread
from typing import Protocol

from ..core.stats import SharedKVStats
from .block_folder import BlockStore, Buffers

logger = logging.getLogger(__name__)

Job = Callable[[], None]
# Runs a job soon, in another thread.
Run = Callable[[Job], None]

READERS = 4
# A request waits for its KV as long as computing it takes, and PATIENCE seconds; LONGEST seconds if
# it is not known how long that takes.
PATIENCE = 0.5
LONGEST = 10.0
# Seconds without writing after the store failed, for example because its volume is full.
PAUSE = 30.0
# A paced writer rests this many times as long as a write took.
PACE = 100
# Hashes that are remembered as written, so that they are not written again.
MOST_KNOWN = 2**18


class HostMemory(Protocol):
    """The host memory of KV blocks."""

    def buffers(self, block: int) -> Buffers:
        """The memory of a host block, always in the same order."""


class Fetch:
    """The KV of a waiting request on its way to host memory.

    `found` is the number of leading `hashes` that the store has, `read` the number of leading host
    `blocks` that were filled; None while that is not known yet.
    """

    __slots__ = (
        *("begun", "deadline", "ended"),
        *("blocks", "filled", "found", "hashes", "left", "read"),
    )

    def __init__(self, hashes: Sequence[bytes], begun: float, deadline: float) -> None:
        self.hashes = hashes
        self.begun, self.deadline = begun, deadline
        self.found: int | None = None
        self.blocks: list[int] = []
        self.read: int | None = None
        self.ended = begun
        self.filled: list[bool] = []
        self.left = 0

    @property
    def seconds(self) -> float:
        """The time from its begin to its end."""
        return self.ended - self.begun


class SharedKVCache:
    """Reads and writes blocks of `memory`. One thread, the scheduler's, calls it.

    At most `most_writing` blocks wait to be written; further ones are not written. With `paced`,
    writing takes a small share of a core while requests run, since the model needs the cores.
    """

    def __init__(
        self,
        store: BlockStore,
        memory: HostMemory,
        block_bytes: int,
        *,
        most_writing: int,
        paced: bool = False,
        reading: Run | None = None,
        writing: Run | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._memory, self._block_bytes = store, memory, block_bytes
        self._most_writing = most_writing
        self._paced = paced
        # Set while nothing runs, and once the engine ends.
        self._idle = Event()
        self._reading = reading or _threads(self, READERS, "kv-read")
        self._writing = writing or _threads(self, 1, "kv-write")
        self._clock = clock
        # Guards everything below that threads change, and tells that a job has ended.
        self._changed = Condition()
        self._jobs_ended = self._jobs_seen = 0
        self._unwritten = 0
        self._written: deque[int] = deque()
        self._known: dict[bytes, None] = {}
        self._paused_until = -inf
        self._counts = dict.fromkeys(("hits", "misses", "skipped", "failed", "in", "out"), 0)
        self._seconds_in = self._seconds_out = 0.0

    def stats(self) -> SharedKVStats:
        with self._changed:
            counts = self._counts
            return SharedKVStats(
                blocks_hit=counts["hits"],
                blocks_missed=counts["misses"],
                blocks_skipped=counts["skipped"],
                blocks_failed=counts["failed"],
                bytes_in=counts["in"] * self._block_bytes,
                bytes_out=counts["out"] * self._block_bytes,
                seconds_in=self._seconds_in,
                seconds_out=self._seconds_out,
            )

    def wait(self, seconds: float) -> None:
        """Waits until a lookup or a read has ended since the last wait, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs_ended > self._jobs_seen, seconds)
            self._jobs_seen = self._jobs_ended

    # Reading

    def find(self, hashes: Sequence[bytes], seconds: float) -> Fetch:
        """Looks up how many leading `hashes` the store has; computing their KV takes `seconds`,
        or an unknown time if that is 0."""
        now = self._clock()
        fetch = Fetch(hashes, now, now + (seconds + PATIENCE if seconds else LONGEST))
        self._reading(partial(self._find, fetch))
        return fetch

    def read(self, fetch: Fetch, blocks: list[int]) -> None:
        """Reads the first blocks of a found fetch into host `blocks`."""
        fetch.blocks, fetch.left = blocks, len(blocks)
        fetch.filled = [False] * len(blocks)
        for index in range(len(blocks)):
            self._reading(partial(self._read, fetch, index))

    def is_late(self, fetch: Fetch) -> bool:
        """Whether its request should wait no longer."""
        return self._clock() > fetch.deadline

    def waited(self, fetch: Fetch) -> float:
        """The seconds since its begin."""
        return self._clock() - fetch.begun

    def _find(self, fetch: Fetch) -> None:
        found = 0
        try:
            while found < len(fetch.hashes) and self._store.has(fetch.hashes[found]):
                found += 1
        except OSError as error:
            self._warn("KV cannot be looked up", error)
        with self._changed:
            for block_hash in fetch.hashes[found:]:
                self._known.pop(block_hash, None)
            self._counts["hits"] += found
            self._counts["misses"] += len(fetch.hashes) - found
            fetch.found = found
            self._end_job()

    def _read(self, fetch: Fetch, index: int) -> None:
        block_hash, filled = fetch.hashes[index], False
        begun = self._clock()
        try:
            if not self.is_late(fetch):
                buffers = self._memory.buffers(fetch.blocks[index])
                filled = self._store.read(block_hash, buffers)
        except OSError as error:
            self._warn("KV cannot be read", error)
        with self._changed:
            fetch.filled[index] = filled
            fetch.left -= 1
            self._counts["in"] += filled
            self._seconds_in += self._clock() - begun
            if filled:
                self._remember(block_hash)
            else:
                self._known.pop(block_hash, None)
                self._counts["failed"] += 1
            if not fetch.left:
                fetch.read = [*fetch.filled, False].index(False)
                fetch.ended = self._clock()
                self._end_job()

    def _end_job(self) -> None:
        self._jobs_ended += 1
        self._changed.notify_all()

    # Writing

    def knows(self, block_hash: bytes) -> bool:
        """Whether the store probably has the block, or gets it."""
        return block_hash in self._known

    def set_idle(self, idle: bool) -> None:
        """Says whether the engine has nothing to compute."""
        if idle:
            self._idle.set()
        else:
            self._idle.clear()

    def room(self) -> int:
        """The number of further blocks that may be written now."""
        with self._changed:
            if self._clock() < self._paused_until:
                return 0
            return self._most_writing - self._unwritten

    def skip(self, blocks: int) -> None:
        """Counts blocks that are not written."""
        with self._changed:
            self._counts["skipped"] += blocks

    def write(self, block: int, block_hash: bytes) -> bool:
        """Writes a host block, unless too much is being written; returns whether it does."""
        if self.room() <= 0:
            self.skip(1)
            return False
        with self._changed:
            self._unwritten += 1
            self._remember(block_hash)
        self._writing(partial(self._write, block, block_hash))
        return True

    def call_after_writes(self, action: Job) -> None:
        """Has `action` called, in another thread, when all writes that were begun have ended."""
        self._writing(action)

    def take_written(self) -> list[int]:
        """The host blocks whose writing has ended since the last call."""
        with self._changed:
            written = list(self._written)
            self._written.clear()
        return written

    def flush(self, seconds: float) -> bool:
        """Waits until all blocks are written, at most `seconds`; returns whether they are."""
        self._idle.set()
        with self._changed:
            return self._changed.wait_for(lambda: not self._unwritten, seconds)

    def _write(self, block: int, block_hash: bytes) -> None:
        begun, written = self._clock(), False
        try:
            if begun >= self._paused_until:
                if not self._store.has(block_hash):
                    self._store.write(block_hash, self._memory.buffers(block))
                written = True
        except OSError as error:
            self._warn("KV cannot be written for some time", error)
            self._paused_until = begun + PAUSE
        with self._changed:
            self._counts["out" if written else "skipped"] += 1
            self._seconds_out += self._clock() - begun
            if not written:
                self._known.pop(block_hash, None)
            self._unwritten -= 1
            self._written.append(block)
            self._changed.notify_all()
        if self._paced:
            self._idle.wait((self._clock() - begun) * PACE)

    def _remember(self, block_hash: bytes) -> None:
        known = self._known
        known.pop(block_hash, None)
        known[block_hash] = None
        if len(known) > MOST_KNOWN:
            del known[next(iter(known))]

    def _warn(self, message: str, error: OSError) -> None:
        logger.warning(message, extra={"error": str(error)})


def _threads(owner: object, count: int, name: str) -> Run:
    """Starts threads that run jobs until `owner` is gone."""
    jobs: SimpleQueue[Job | None] = SimpleQueue()
    for number in range(count):
        # Daemons, so that a volume that hangs does not keep the process alive.
        Thread(target=_work, args=(jobs,), name=f"{name}-{number}", daemon=True).start()
    weakref.finalize(owner, _end, jobs, count)
    return jobs.put


def _work(jobs: "SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


def _end(jobs: "SimpleQueue[Job | None]", count: int) -> None:
    for _ in range(count):
        jobs.put(None)
