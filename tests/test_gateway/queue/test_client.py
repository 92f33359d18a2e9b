"""The gateway's client on the queue in memory: its guarantees to callers."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from headrace_common.errors import FailureCode, QueueFull, RequestConflict, RequestFailed
from headrace_common.protocol.base import (
    MAX_REQUEUES,
    AdmitResult,
    EngineQueue,
    EngineStatus,
    Lease,
    Outcome,
    QueueLimits,
)
from headrace_common.protocol.failures import failed
from headrace_common.wire.messages import (
    ChoiceState,
    Frame,
    GenerateRequest,
    Logprobs,
    Resume,
    Takeover,
    Tokens,
)
from headrace_gateway.queue_client.client import (
    ClientConfig,
    Delta,
    Generation,
    GenerationClient,
)
from headrace_gateway.queue_client.engines import EngineDirectory
from headrace_gateway.queue_client.generation import merged
from headrace_testing.backends import MODEL, InMemory, make_request, make_status
from headrace_testing.fake_engine import FakeEngine, is_one_history
from headrace_testing.waiting import eventually, first

CONFIG = ClientConfig(beat_interval=0.1, silence=0.2, recheck=0.2, longest_recheck=0.4)


@pytest.fixture
def memory() -> InMemory:
    return InMemory()


@pytest.fixture
async def client(memory: InMemory) -> AsyncIterator[GenerationClient]:
    client = GenerationClient(memory.gateway(), QueueLimits(max_requests=2), config=CONFIG)
    await client.start()
    yield client
    await client.close()


@pytest.fixture
async def serve(memory: InMemory) -> AsyncIterator[Callable[[str], FakeEngine]]:
    """Starts fake engines."""
    tasks = []

    def start(name: str) -> FakeEngine:
        engine = FakeEngine(memory.engine(name, lease_ms=500), MODEL, token_delay=0.001)
        tasks.append(asyncio.create_task(engine.run()))
        return engine

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def collect(generation: Generation) -> list[Delta]:
    async with asyncio.timeout(30):
        return [delta async for delta in generation]


async def leased(engine: EngineQueue) -> Lease:
    (lease,) = await engine.take(1)
    return lease


def tokens(lease: Lease, index: int, *ids: int, end: str | None = None) -> Tokens:
    return Tokens(
        request_id=lease.request.request_id,
        attempt=lease.attempt,
        choice=0,
        index=index,
        token_ids=ids,
        finish_reason=end,
    )


async def test_a_slow_reader_gets_larger_pieces(memory: InMemory, client: GenerationClient) -> None:
    engine = memory.engine()
    generation = await client.submit(make_request(n=2))
    lease = await leased(engine)
    other = tokens(lease, 0, 9)._replace(choice=1)
    replies = [tokens(lease, 0, 1), tokens(lease, 1, 2, 3), other, tokens(lease, 3, 4, end="stop")]
    await engine.publish({lease.gateway_id: replies})

    async def arrived() -> bool:
        return generation.arbiter.token_count(0) == 4

    await eventually(arrived)
    deltas = [await anext(generation) for _ in range(3)]
    assert [(delta.choice, delta.token_ids) for delta in deltas] == [
        (0, (1, 2, 3)),
        (1, (9,)),
        (0, (4,)),
    ]
    assert [delta.finish_reason for delta in deltas] == [None, None, "stop"]


async def test_streams_that_came_together_are_written_after_all_are_made(
    memory: InMemory, client: GenerationClient
) -> None:
    engine, calls = memory.engine(), list[str]()
    for name in ("a", "b"):
        generation = await client.submit(make_request())

        def make(name: str = name) -> Callable[[], None]:
            calls.append(f"make {name}")
            return lambda: calls.append(f"write {name}")

        generation.listen(make)
    leases = [await leased(engine), await leased(engine)]
    await engine.publish({leases[0].gateway_id: [tokens(lease, 0, 1) for lease in leases]})

    async def written() -> bool:
        return len(calls) == 4

    await eventually(written)
    assert [call.split()[0] for call in calls] == ["make", "make", "write", "write"]


def test_merging_keeps_log_probabilities_with_their_tokens() -> None:
    first_token, second_token = Logprobs(-1.0, 1, ()), Logprobs(-2.0, 1, ())
    known, unknown = Delta(0, (1,), (first_token,)), Delta(0, (3,))
    last = Delta(0, (2,), (second_token,), "length")
    both = Delta(0, (1, 2), (first_token, second_token), "length")
    assert merged([known, last]) == both
    waiting = [known, unknown, unknown]
    assert merged(waiting) == known
    assert merged(waiting) == Delta(0, (3, 3))


def test_one_stream_does_not_delay_others() -> None:
    waiting = [Delta(0, (number,)) for number in range(100)]
    sizes = [len(merged(waiting).token_ids) for _ in range(2)]
    assert sizes == [64, 36]


async def test_a_refusal_counts_the_wait_until_a_sleeping_engine_wakes(memory: InMemory) -> None:
    queue = memory.gateway()
    directory = EngineDirectory(queue, clock=itertools.count(step=2).__next__)
    client = GenerationClient(queue, QueueLimits(max_requests=1), turn=directory.time_to_turn)
    await client.start()
    await client.submit(make_request())

    async def retry_after(**statuses: EngineStatus) -> float:
        for name, status in statuses.items():
            await memory.engine(name).beat((), status)
        with pytest.raises(QueueFull) as refused:
            await client.submit(make_request())
        return refused.value.retry_after

    asleep = replace(make_status("a"), sleep_level=1, time_to_turn=42.0)
    assert await retry_after() == 5.0, "no engine is known"
    assert await retry_after(a=asleep) == 47.0
    assert await retry_after(b=replace(make_status("b"), sleep_level=2, time_to_turn=90.0)) == 47.0
    assert await retry_after(a=replace(asleep, time_to_turn=30.0)) == 35.0
    assert await retry_after(c=replace(make_status("c"), draining=True)) == 35.0
    assert await retry_after(b=make_status("b")) == 5.0, "it is awake"
    await client.close()


async def test_a_generation_yields_every_choice_to_its_end(
    client: GenerationClient, serve: Callable[[str], FakeEngine]
) -> None:
    serve("e1")
    generation = await client.submit(make_request(n=3, max_tokens=7))
    deltas = await collect(generation)
    for choice in range(3):
        ids = [t for d in deltas if d.choice == choice for t in d.token_ids]
        assert len(ids) == 7 and is_one_history(choice, ids)
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"] * 3
    assert generation.ended
    assert await collect(generation) == []
    assert client.active == 0


async def test_a_generation_reports_whether_an_engine_has_started(
    client: GenerationClient, memory: InMemory
) -> None:
    generation = await client.submit(make_request())
    assert (generation.ended, generation.started) == (False, False)
    engine = memory.engine()
    await engine.publish({"g": [tokens(await leased(engine), 0, 5)]})
    assert (await anext(generation)).token_ids == (5,)
    assert (generation.ended, generation.started) == (False, True)


async def test_cancel_reaches_queue_and_engine(
    client: GenerationClient, serve: Callable[[str], FakeEngine]
) -> None:
    engine = serve("e1")
    engine.token_delay = 0.05
    async with await client.submit(make_request(max_tokens=10_000)) as generation:
        await anext(generation)
    with pytest.raises(RequestFailed) as failed:
        await anext(generation)
    assert failed.value.failure is FailureCode.CANCELLED

    async def is_free() -> bool:
        depth = await client.queue.depth(MODEL)
        return not engine.active and depth.pending == 0

    await eventually(is_free)
    await generation.cancel()


async def test_a_stopped_choice_ends_alone(
    client: GenerationClient, serve: Callable[[str], FakeEngine]
) -> None:
    engine = serve("e1")
    engine.token_delay = 0.02
    generation = await client.submit(make_request(n=2, max_tokens=60))
    while (await anext(generation)).choice != 0:
        pass
    await generation.stop_choice(0, 1)
    deltas = await collect(generation)
    assert deltas[-1].choice == 1 and deltas[-1].finish_reason == "length"

    async def is_free() -> bool:
        return not engine.active

    await eventually(is_free)


async def test_waiting_with_a_timeout_does_not_cancel(
    client: GenerationClient, memory: InMemory
) -> None:
    generation = await client.submit(make_request())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(generation)
    engine = memory.engine()
    await engine.publish({"g": [tokens(await leased(engine), 0, 5, end="stop")]})
    assert [d.token_ids for d in await collect(generation)] == [(5,)]


async def test_a_full_queue_refuses_a_request_and_keeps_no_state_of_it(
    client: GenerationClient,
) -> None:
    for _ in range(2):
        await client.submit(make_request())
    with pytest.raises(QueueFull):
        await client.submit(make_request())
    assert client.active == 2


async def test_one_id_cannot_be_in_flight_twice(client: GenerationClient) -> None:
    request = make_request()
    await client.submit(request)
    with pytest.raises(RequestConflict):
        await client.submit(request)


async def test_the_deadline_is_kept_without_any_engine(client: GenerationClient) -> None:
    generation = await client.submit(make_request(seconds=0.05))
    with pytest.raises(RequestFailed) as failed:
        await collect(generation)
    assert failed.value.failure is FailureCode.DEADLINE

    async def is_gone() -> bool:
        return (await client.queue.depth(MODEL)).waiting == 0

    await eventually(is_gone)


async def test_a_silent_engine_loses_its_request(
    client: GenerationClient, memory: InMemory
) -> None:
    generation = await client.submit(make_request())
    silent, other = memory.engine("e1"), memory.engine("e2")
    lease = await leased(silent)
    await silent.publish({"g": [tokens(lease, 0, 5, 6)]})
    found: list[Lease] = []

    async def released() -> bool:
        found.extend(await other.reap(1))
        return bool(found)

    await eventually(released)
    rid = lease.request.request_id
    await other.publish({"g": [Takeover(request_id=rid, attempt=2)]})
    (resume,) = await first(other.controls(), 1)
    assert getattr(resume, "choices", None) == (ChoiceState(token_ids=(5, 6)),)
    await silent.publish({"g": [tokens(lease, 2, 66)]})
    await other.publish({"g": [tokens(found[0], 2, 7, end="stop")]})
    assert [t for d in await collect(generation) for t in d.token_ids] == [5, 6, 7]


async def test_requests_of_a_silent_engine_are_rechecked_less_and_less_often(
    memory: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be no other engine, and thousands of such requests."""
    config = ClientConfig(beat_interval=0.1, silence=0.04, recheck=0.04, longest_recheck=60.0)
    queue = memory.gateway()
    released: list[tuple[object, ...]] = []
    release, admit = queue.release, queue.admit
    admissions = 0

    async def counted_release(*args: Any) -> None:
        released.append(args)
        await release(*args)

    async def counted_admit(*args: Any, **options: Any) -> AdmitResult:
        nonlocal admissions
        admissions += 1
        return await admit(*args, **options)

    monkeypatch.setattr(queue, "release", counted_release)
    monkeypatch.setattr(queue, "admit", counted_admit)
    client = GenerationClient(queue, QueueLimits(), config=config)
    await client.start()
    engine = memory.engine("e1")
    generation = await client.submit(make_request())
    lease = await leased(engine)
    await engine.publish({"g": [tokens(lease, 0, 5)]})

    async def given_up() -> bool:
        return bool(released)

    await eventually(given_up)
    known = admissions

    await asyncio.sleep(0.6)  # 60 turns of the watchdog; with doubling pauses it asks 4 times

    assert admissions - known <= 5
    assert len(released) <= 6
    await generation.cancel()
    await client.close()


async def test_signs_of_life_keep_a_request_with_a_slow_engine(memory: InMemory) -> None:
    config = replace(CONFIG, silence=0.5)
    client = GenerationClient(memory.gateway(), QueueLimits(), config=config)
    await client.start()
    generation = await client.submit(make_request())
    slow, other = memory.engine("e1"), memory.engine("e2")
    await leased(slow)
    end = asyncio.get_running_loop().time() + 1.5 * config.silence
    while asyncio.get_running_loop().time() < end:
        await slow.publish({"g": []})
        await asyncio.sleep(0.05)  # far less than the silence after which it would lose the request
        assert await other.reap(1) == []
    await generation.cancel()
    await client.close()


async def test_a_lost_request_is_queued_again(client: GenerationClient, memory: InMemory) -> None:
    generation = await client.submit(make_request())
    await memory.wipe()
    engine = memory.engine()
    found: list[Lease] = []

    async def queued() -> bool:
        found.extend(await engine.take(1))
        return bool(found)

    await eventually(queued)
    await engine.publish({"g": [tokens(found[0], 0, 5, end="stop")]})
    assert len(await collect(generation)) == 1


async def test_lost_last_frames_come_from_the_stored_outcome(
    client: GenerationClient, memory: InMemory
) -> None:
    generation = await client.submit(make_request())
    engine = memory.engine()
    lease = await leased(engine)
    await engine.publish({"g": [tokens(lease, 0, 5)]})
    state = ChoiceState(token_ids=(5, 6), finish_reason="length")
    await engine.finish(lease.request.request_id, 1, Outcome(choices=(state,)))
    assert [d.token_ids for d in await collect(generation)] == [(5,), (6,)]


async def continue_and_end(engine: EngineQueue, generation: Generation) -> None:
    """Another engine continues the request after the client's tokens, and ends it."""
    lease = await taken(engine)
    rid = lease.request.request_id
    await engine.publish({"g": [Takeover(request_id=rid, attempt=lease.attempt)]})
    (resume,) = await first(engine.controls(), 1)
    assert isinstance(resume, Resume) and resume.choices == generation.arbiter.states()
    for number, state in enumerate(resume.choices):
        if state.finish_reason is None:
            rest = tokens(lease, len(state.token_ids), 7, end="stop")._replace(choice=number)
            await engine.publish({"g": [rest]})


async def taken(engine: EngineQueue) -> Lease:
    """Waits for the next request."""
    found: list[Lease] = []

    async def queued() -> bool:
        found.extend(await engine.take(1))
        return bool(found)

    await eventually(queued)
    return found[0]


async def lose(engine: EngineQueue, lease: Lease, why: FailureCode = FailureCode.LOST) -> None:
    """Ends a request, like an engine that knows neither its gateway nor the tokens sent to it."""
    message = failed(lease.request.request_id, lease.attempt, why)
    await engine.publish({"g": [message]})
    await engine.finish(lease.request.request_id, lease.attempt, Outcome(failed=message))


@pytest.mark.parametrize("why", [FailureCode.LOST, FailureCode.ABANDONED])
async def test_a_request_that_its_engine_lost_continues(
    client: GenerationClient, memory: InMemory, why: FailureCode
) -> None:
    generation = await client.submit(make_request(n=2))
    engine = memory.engine()
    lease = await leased(engine)
    ended = tokens(lease, 0, 4, end="stop")._replace(choice=1)
    await engine.publish({"g": [tokens(lease, 0, 5, 6), ended]})
    await lose(engine, lease, why)
    await continue_and_end(memory.engine("e2"), generation)
    deltas = await collect(generation)
    assert [t for d in deltas if d.choice == 0 for t in d.token_ids] == [5, 6, 7]
    assert [t for d in deltas if d.choice == 1 for t in d.token_ids] == [4]


async def test_a_request_that_every_engine_loses_ends(
    client: GenerationClient, memory: InMemory
) -> None:
    generation = await client.submit(make_request())
    engine = memory.engine()
    for _ in range(1 + MAX_REQUEUES):
        await lose(engine, await taken(engine))
    with pytest.raises(RequestFailed) as error:
        await collect(generation)
    assert error.value.failure is FailureCode.LOST


async def test_a_lost_request_that_was_cancelled_is_not_run(
    client: GenerationClient, memory: InMemory
) -> None:
    generation = await client.submit(make_request())
    engine = memory.engine()
    await lose(engine, await leased(engine))
    await generation.cancel()
    assert await engine.take(1) == []
    assert (await client.queue.depth(MODEL)).waiting == 0


async def store_another_outcome(engine: EngineQueue) -> None:
    """Stores an outcome whose tokens differ from those that the client has."""
    lease = await leased(engine)
    await engine.publish({"g": [tokens(lease, 0, 5)]})
    state = ChoiceState(token_ids=(9, 9), finish_reason="length")
    await engine.finish(lease.request.request_id, 1, Outcome(choices=(state,)))


@pytest.mark.parametrize("keep_ms", [0, 60_000])
async def test_an_outcome_with_other_tokens_is_not_given_to_the_client(
    client: GenerationClient, memory: InMemory, keep_ms: int
) -> None:
    generation = await client.submit(replace(make_request(), keep_ms=keep_ms))
    await store_another_outcome(memory.engine())
    await continue_and_end(memory.engine("e2"), generation)
    assert [t for d in await collect(generation) for t in d.token_ids] == [5, 7]


async def test_an_outcome_that_a_client_was_given_is_not_replaced(
    client: GenerationClient, memory: InMemory
) -> None:
    """One key has one answer; a client that has begun to read another answer gets an error."""
    generation = await client.submit(replace(make_request(), keep_ms=60_000))
    await store_another_outcome(memory.engine())
    await client.queue.deliver_outcome(generation.request_id, MODEL)
    with pytest.raises(RequestFailed) as error:
        await collect(generation)
    assert error.value.failure is FailureCode.LOST


async def test_an_engine_that_runs_an_unknown_request_is_reported(
    client: GenerationClient, memory: InMemory
) -> None:
    engine = memory.engine()
    await engine.publish({"g": [Takeover(request_id="0.gone", attempt=3)]})
    (control,) = await first(engine.controls(), 1)
    assert getattr(control, "superseded", None) is False
    assert client.ignored["unknown_request"] == 1


async def test_requests_survive_an_outage_of_redis(
    client: GenerationClient, memory: InMemory
) -> None:
    generation = await client.submit(make_request())
    memory.store.available = False
    await asyncio.sleep(3 * CONFIG.silence)
    memory.store.available = True
    engine = memory.engine()
    await engine.beat([], make_status())
    await engine.publish({"g": [tokens(await leased(engine), 0, 5, end="stop")]})
    assert len(await collect(generation)) == 1


async def test_close_ends_requests_in_flight(memory: InMemory) -> None:
    client = GenerationClient(memory.gateway("g2"), QueueLimits(), config=CONFIG)
    await client.start()
    generation = await client.submit(make_request())
    await client.close()
    with pytest.raises(RequestFailed):
        await collect(generation)
    with suppress(RequestFailed):
        await anext(generation)
    assert client.failed is None


async def test_frames_of_another_models_engines_are_not_read(
    memory: InMemory, client: GenerationClient
) -> None:
    generation = await client.submit(make_request())
    lease = await leased(memory.engine())
    false, right = tokens(lease, 0, 9), tokens(lease, 0, 1, end="stop")
    client._dispatch(Frame("e", (false,), "org/another"))
    client._dispatch(Frame("e", (right,), MODEL))
    assert [delta.token_ids for delta in await collect(generation)] == [(1,)]
    assert client.ignored["another_model"] == 1


async def test_a_corrupt_queue_fails_only_its_own_requests(
    memory: InMemory, client: GenerationClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt, other = await client.submit(make_request()), await client.submit(make_request())
    admit = client.queue.admit

    async def fail(request: GenerateRequest, *args: Any, **more: Any) -> AdmitResult:
        if request.request_id == spoilt.request_id:
            raise ValueError("its engines wrote something other than a number")
        return await admit(request, *args, **more)

    monkeypatch.setattr(client.queue, "admit", fail)
    with pytest.raises(RequestFailed, match="is corrupt"):
        await collect(spoilt)
    assert client.failed is None
    engine = memory.engine()
    for lease in await engine.take(2):
        if lease.request.request_id == other.request_id:
            await engine.publish({lease.gateway_id: [tokens(lease, 0, 1, end="stop")]})
    assert [delta.token_ids for delta in await collect(other)] == [(1,)]


async def given(memory: InMemory) -> list[int]:
    """The output tokens of all requests in the ledger."""
    entries = await memory.ledger()
    return [
        sum(entry.output_tokens for entry in entries if entry.request_id == rid)
        for rid in dict.fromkeys(entry.request_id for entry in entries)
    ]


async def test_a_client_that_leaves_pays_for_the_tokens_that_had_come(
    memory: InMemory, client: GenerationClient
) -> None:
    engine = memory.engine()
    generation = await client.submit(make_request(n=2))
    lease = await leased(engine)
    other = tokens(lease, 0, 9)._replace(choice=1)
    await engine.publish({lease.gateway_id: [tokens(lease, 0, 1, 2), other]})
    await anext(generation)
    await generation.cancel()
    assert await given(memory) == [3]


@pytest.mark.parametrize("ended", [False, True])
async def test_tokens_after_a_stop_string_are_not_paid(
    memory: InMemory, client: GenerationClient, ended: bool
) -> None:
    """Whether their engine has ended the request before it hears of the stop, or not."""
    engine = memory.engine()
    generation = await client.submit(make_request())
    lease = await leased(engine)
    end = "length" if ended else None
    await engine.publish({lease.gateway_id: [tokens(lease, 0, 1, 2, 3, end=end)]})
    await anext(generation)
    await generation.stop_choice(0, 2)
    states = (ChoiceState(token_ids=(1, 2, 3, 4), finish_reason="length"),)
    await engine.finish(lease.request.request_id, 1, Outcome(choices=states))

    async def corrected() -> bool:
        return await given(memory) == [2]

    await eventually(corrected)


async def test_what_a_client_was_given_is_written_once_redis_is_back(
    memory: InMemory, client: GenerationClient
) -> None:
    engine = memory.engine()
    generation = await client.submit(make_request())
    lease = await leased(engine)
    await engine.publish({lease.gateway_id: [tokens(lease, 0, 1, 2, 3)]})
    await anext(generation)
    memory.store.available = False
    await generation.cancel()
    memory.store.available = True
    states = (ChoiceState(token_ids=(1, 2, 3, 4), finish_reason="length"),)
    await engine.finish(lease.request.request_id, 1, Outcome(choices=states))

    async def corrected() -> bool:
        return await given(memory) == [3]

    await eventually(corrected)


async def test_a_request_whose_end_redis_has_lost_is_paid_as_it_was_given(
    memory: InMemory, client: GenerationClient
) -> None:
    engine = memory.engine()
    generation = await client.submit(make_request())
    lease = await leased(engine)
    await engine.publish({lease.gateway_id: [tokens(lease, 0, 1, 2, end="stop")]})
    await collect(generation)
    takeover = Takeover(request_id=lease.request.request_id, attempt=1)
    await engine.publish({lease.gateway_id: [takeover]})
    abandoned = failed(lease.request.request_id, 1, FailureCode.ABANDONED)
    await engine.finish(lease.request.request_id, 1, Outcome(failed=abandoned))

    async def corrected() -> bool:
        return await given(memory) == [2]

    await eventually(corrected)
