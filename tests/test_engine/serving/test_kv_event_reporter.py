"""What is told of cached blocks: a reader that begins anywhere, or misses something, ends right."""

import asyncio
from hashlib import sha256

import pytest

from headrace_common.errors import BackendUnavailable, BackendUnfit, HeadraceError
from headrace_common.protocol.kv_events import MAX_CHANGES, MAX_EVENTS, FollowedFilter, KVEvent
from headrace_engine.kv_cache.cached_blocks import CachedBlocks
from headrace_engine.serving.kv_event_reporter import REFUSED_PAUSE, KVEventReporter


class Stream:
    """A KVEventWriter that keeps the events as Redis does."""

    def __init__(self) -> None:
        self.events: list[KVEvent] = []
        self.failure: HeadraceError | None = None
        self.written = asyncio.Event()

    async def write(self, event: KVEvent) -> bool:
        if self.failure is not None:
            raise self.failure
        if event.whole is not None:
            self.events = []
        elif not self.events:
            return False
        self.events.append(event)
        self.written.set()
        return True

    async def renew(self) -> bool:
        return bool(self.events)

    def follow(self, after: int = 0) -> FollowedFilter:
        """What a reader knows that reads all events, without those up to the number `after`."""
        followed = FollowedFilter()
        for event in self.events:
            if event.number > after:
                followed.follow(str(event.number), event)
        return followed


def block(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def believed(followed: FollowedFilter, numbers: range) -> list[bool]:
    assert followed.filter is not None
    return [followed.filter.may_have(block(number)) for number in numbers]


async def test_a_reader_knows_what_is_cached_whenever_it_begins() -> None:
    cached, stream = CachedBlocks(20), Stream()
    reporter = KVEventReporter(cached, stream, 16)
    wholes = 0
    for number in range(2 * MAX_EVENTS + 1):
        cached.add(block(number))
        if number >= 100:
            cached.remove(block(number - 100))
        await reporter.report()
        wholes += stream.events[-1].whole is not None
        assert len(stream.events) <= MAX_EVENTS
        latest = range(max(0, number - 102), number + 1)
        assert believed(stream.follow(), latest) == [number - 100 < kept for kept in latest]
    assert wholes == 3, "the first one, and as often as the bound of events asks for"
    assert stream.follow(after=stream.events[0].number).filter is None


async def test_many_changes_are_told_as_a_whole_filter() -> None:
    cached, stream = CachedBlocks(20), Stream()
    reporter = KVEventReporter(cached, stream, 16)
    await reporter.report()
    for number in range(2 * MAX_CHANGES):
        cached.add(block(number))
    await reporter.report()
    assert [event.whole is not None for event in stream.events] == [True]
    assert all(believed(stream.follow(), range(2 * MAX_CHANGES)))


async def test_lost_events_are_replaced_by_a_whole_filter() -> None:
    cached, stream = CachedBlocks(10), Stream()
    reporter = KVEventReporter(cached, stream, 16)
    cached.add(block(1))
    await reporter.report()
    stream.events = []  # Redis was emptied
    await reporter.report()
    assert believed(stream.follow(), range(1, 2)) == [True]
    stream.events = []
    cached.add(block(2))
    await reporter.report()
    assert believed(stream.follow(), range(1, 3)) == [True, True]


@pytest.mark.parametrize("failure", [BackendUnavailable("away"), BackendUnfit("not allowed")])
async def test_an_engine_serves_on_while_nothing_can_be_told(failure: HeadraceError) -> None:
    cached, stream = CachedBlocks(10), Stream()
    pauses: list[float] = []
    paused = asyncio.Event()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        paused.set()
        await asyncio.sleep(0)

    reporter = KVEventReporter(cached, stream, 16, sleep)
    stream.failure = failure
    cached.add(block(1))
    task = asyncio.create_task(reporter.keep())
    await paused.wait()
    stream.failure = None
    cached.add(block(2))
    reporter.notify()
    await stream.written.wait()
    assert believed(stream.follow(), range(1, 3)) == [True, True]
    assert (REFUSED_PAUSE in pauses) == isinstance(failure, BackendUnfit)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
