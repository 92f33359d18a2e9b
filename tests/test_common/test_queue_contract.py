"""What gateways and engines may rely on, on both backends. What only Redis can do is elsewhere."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from headrace_common import keys
from headrace_common.errors import FailureCode, QueueFull, RequestConflict
from headrace_common.messages import (
    Cancel,
    ChoiceState,
    Failed,
    GenerateRequest,
    Logprobs,
    Reroute,
    Sync,
    Takeover,
    Tokens,
)
from headrace_common.protocol.base import (
    MOST_ANEW,
    AdmitState,
    Beat,
    EngineQueue,
    Lease,
    Outcome,
    Progress,
    QueueLimits,
    Standing,
    Verdict,
)
from headrace_common.protocol.failures import failed
from headrace_testing.backends import MODEL, Backend, make_request, make_status
from headrace_testing.waiting import eventually, first

LIMITS = QueueLimits()

pytestmark = pytest.mark.parametrize(
    "backend",
    ["memory", "redis", "sentinel", "cluster", "users", "memory*3", "redis*3", "cluster*3"],
    indirect=True,
)


@pytest.fixture(autouse=True)
def in_the_last_shard(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """All holds there as well as in an only one."""
    new = partial(keys.new_request_id, backend.shards - 1)
    monkeypatch.setattr(keys, "new_request_id", new)


def progress(lease: Lease, *token_ids: int, journaled: int = 0, **options: Any) -> Progress:
    return Progress(
        request_id=lease.request.request_id,
        attempt=lease.attempt,
        journaled=(journaled,),
        choices=(ChoiceState(token_ids=token_ids),),
        **options,
    )


async def beat(engine: EngineQueue, item: Progress) -> Beat:
    beats = await engine.beat([item], make_status(engine.engine_id))
    return beats[item.request_id]


def tokens(lease: Lease, index: int, *token_ids: int) -> Tokens:
    return Tokens(
        request_id=lease.request.request_id,
        attempt=lease.attempt,
        choice=0,
        index=index,
        token_ids=token_ids,
    )


def done(*token_ids: int) -> Outcome:
    return Outcome(choices=(ChoiceState(token_ids=token_ids, finish_reason="length"),))


def lost(lease: Lease) -> Outcome:
    return Outcome(failed=failed(lease.request.request_id, lease.attempt, FailureCode.LOST))


async def started(backend: Backend, engine: EngineQueue) -> Lease:
    """A request that `engine` has taken."""
    gateway = backend.gateway()
    await gateway.start()
    await engine.start()
    await gateway.admit(make_request(), LIMITS)
    (lease,) = await engine.take(1)
    return lease


async def moved(backend: Backend, lease: Lease, old: EngineQueue, new: EngineQueue) -> Lease:
    """The lease after `old` went silent and `new` reaped it."""
    rid = lease.request.request_id
    await backend.gateway().release(rid, MODEL, old.engine_id, lease.attempt)
    (again,) = await new.reap(1)
    return again


async def test_a_request_arrives_as_it_was_sent(backend: Backend) -> None:
    gateway, engine = backend.gateway("g1"), backend.engine()
    request = make_request(prompt=(1, 0, 2**32 - 1), n=2)
    assert (await gateway.admit(request, LIMITS)).state is AdmitState.ADMITTED
    (lease,) = await engine.take(4)
    assert lease == Lease(request=request, attempt=1, gateway_id="g1")


async def test_admitting_again_delivers_once(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    request = make_request()
    await gateway.admit(request, LIMITS)
    again = await gateway.admit(request, LIMITS, seen=0)
    assert (again.state, again.owner) == (AdmitState.ATTACHED, None)
    assert len(await engine.take(4)) == 1
    third = await gateway.admit(request, LIMITS, seen=0)
    assert (third.owner, third.attempt) == ("e", 1)


async def test_another_request_under_a_used_id_is_refused(backend: Backend) -> None:
    gateway = backend.gateway()
    request = make_request()
    await gateway.admit(request, LIMITS)
    with pytest.raises(RequestConflict):
        await gateway.admit(make_request(request_id=request.request_id, prompt=(9,)), LIMITS)


async def test_a_second_gateway_gets_the_stream(backend: Backend) -> None:
    engine = backend.engine()
    lease = await started(backend, engine)
    other = backend.gateway("g2")
    admission = await other.admit(lease.request, LIMITS)
    assert (admission.state, admission.owner) == (AdmitState.ATTACHED, "e")
    (control,) = await first(engine.controls(), 1)
    assert control == Reroute(request_id=lease.request.request_id, gateway_id="g2")
    assert (await beat(engine, progress(lease))).gateway_id == "g2"


async def test_the_queue_is_bounded_in_requests(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    limits = QueueLimits(max_requests=2)
    known = make_request()
    for request in (known, make_request()):
        await gateway.admit(request, limits)
    with pytest.raises(QueueFull) as full:
        await gateway.admit(make_request(), limits)
    assert full.value.retry_after > 0
    assert (await gateway.admit(known, limits, seen=0)).state is AdmitState.ATTACHED
    await engine.take(1)
    await gateway.admit(make_request(), limits)


async def test_the_queue_is_bounded_in_tokens(backend: Backend) -> None:
    gateway = backend.gateway()
    limits = QueueLimits(max_tokens=40)
    await gateway.admit(make_request(max_tokens=30), limits)
    with pytest.raises(QueueFull):
        await gateway.admit(make_request(max_tokens=30), limits)
    assert (await gateway.depth(MODEL)).waiting_tokens == 33


async def test_an_accepted_request_is_never_refused_again(backend: Backend) -> None:
    gateway = backend.gateway()
    await gateway.admit(make_request(), QueueLimits(max_requests=1))
    lost = make_request()  # Redis knows nothing of it
    again = await gateway.admit(lost, QueueLimits(max_requests=1), seen=2)
    assert again.state is AdmitState.ADMITTED
    engine = backend.engine()
    leases = await engine.take(4)
    assert [(le.attempt, le.recovered) for le in leases] == [(1, False), (3, True)]


async def test_priorities_are_served_in_order(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    for priority in (5, 0, -1, 0, -3):
        await gateway.admit(make_request(priority=priority), LIMITS)
    leases = await engine.take(9)
    assert [lease.request.priority for lease in leases] == [-1, -3, 0, 0, 5]


async def test_low_priorities_are_not_starved(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    for priority in [-1] * 40 + [1, 1]:
        await gateway.admit(make_request(priority=priority), LIMITS)
    served = [(await engine.take(1))[0].request.priority for _ in range(36)]
    assert served.count(1) == 2


async def test_what_does_not_fit_stays_first(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await engine.start()
    large = make_request(prompt=(1,) * 50)
    for request in (make_request(), large, make_request()):
        await gateway.admit(request, LIMITS)
    assert len(await engine.take(9, 40)) == 1
    assert await engine.take(9, 40) == []
    assert (await gateway.depth(MODEL)).waiting == 2
    leases = await engine.take(9, 60)
    assert [lease.request for lease in leases][0] == large
    assert len(leases) == 2


async def test_waiting_ends_with_something_new_only(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await engine.start()
    await gateway.admit(make_request(prompt=(1,) * 50), LIMITS)
    assert await engine.take(9, 10) == []
    waiting = asyncio.create_task(engine.wait())
    done_early, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done_early, "an entry that did not fit is not new"
    await gateway.admit(make_request(priority=-1), LIMITS)
    await asyncio.wait_for(waiting, 20)


async def test_waiting_ends_when_a_started_request_is_free_again(backend: Backend) -> None:
    engine, other = backend.engine("e1"), backend.engine("e2")
    lease = await started(backend, engine)
    await other.start()
    waiting = asyncio.create_task(other.wait())
    await asyncio.sleep(0)
    await engine.give_back([lease.request.request_id])
    await asyncio.wait_for(waiting, 20)
    assert len(await other.reap(1)) == 1


async def test_an_expired_request_is_answered_and_not_run(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await gateway.start()
    request = make_request(seconds=-1)
    await gateway.admit(request, LIMITS)
    assert await engine.take(4) == []
    (frame,) = await first(gateway.frames(), 1)
    assert isinstance(frame.replies[0], Failed)
    assert frame.replies[0].failure is FailureCode.DEADLINE
    ended = await gateway.admit(request, LIMITS, seen=0)
    assert ended.outcome is not None and ended.outcome.failed is not None
    assert ended.outcome.failed.failure is FailureCode.DEADLINE


async def test_a_running_request_expires(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    for seconds in (0.05, 0.5, 5.0, 50.0):  # on a busy machine it may expire before it is taken
        await gateway.admit(make_request(seconds=seconds), LIMITS)
        await engine.wait()  # what was found empty is not looked at before
        if leases := await engine.take(1):
            break
    (lease,) = leases

    async def expired() -> bool:
        return (await beat(engine, progress(lease))).verdict is Verdict.EXPIRED

    await eventually(expired)


async def test_a_cancelled_waiting_request_is_never_run(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    request = make_request()
    await gateway.admit(request, LIMITS)
    for _ in range(2):
        await gateway.cancel(request.request_id, MODEL)
    assert await engine.take(4) == []
    assert (await gateway.depth(MODEL)).waiting == 0
    assert (await gateway.depth(MODEL)).waiting_tokens == 0
    await gateway.cancel("0.unknown", MODEL)


async def test_a_cancelled_running_request_is_told_to_its_engine(backend: Backend) -> None:
    engine = backend.engine()
    lease = await started(backend, engine)
    gateway = backend.gateway()
    await gateway.cancel(lease.request.request_id, MODEL)
    (control,) = await first(engine.controls(), 1)
    assert control == Cancel(request_id=lease.request.request_id)
    assert (await beat(engine, progress(lease))).verdict is Verdict.CANCELLED
    assert not await engine.finish(lease.request.request_id, lease.attempt, done(1))
    assert (await gateway.depth(MODEL)).pending == 0


async def test_a_finished_request_tells_its_outcome_to_whoever_asks(backend: Backend) -> None:
    engine = backend.engine()
    lease = await started(backend, engine)
    for _ in range(2):
        assert await engine.finish(lease.request.request_id, lease.attempt, done(5, 6))
    gateway = backend.gateway()
    admission = await gateway.admit(lease.request, LIMITS, seen=1)
    assert (admission.state, admission.outcome) == (AdmitState.ENDED, done(5, 6))
    await gateway.cancel(lease.request.request_id, MODEL)
    assert (await gateway.admit(lease.request, LIMITS, seen=1)).outcome == done(5, 6)
    assert await gateway.drain_rate(MODEL) > 0


async def test_a_frozen_engine_cannot_take_its_request_back(backend: Backend) -> None:
    engine, other = backend.engine("e1"), backend.engine("e2")
    lease = await started(backend, engine)
    again = await moved(backend, lease, engine, other)
    assert (again.attempt, again.recovered, again.suspect) == (2, True, False)
    assert (await beat(engine, progress(lease, 1))).verdict is Verdict.STOLEN
    assert not await engine.finish(lease.request.request_id, 1, done(1))
    assert not await engine.resume(lease.request.request_id, 1, [ChoiceState()])
    await engine.give_back([lease.request.request_id])
    assert await backend.engine("e3").reap(4) == []
    assert (await beat(other, progress(again))).verdict is Verdict.OWNED


async def test_a_lease_lapses_without_beats(backend: Backend) -> None:
    engine, other = backend.engine("e1"), backend.engine("e2", lease_ms=20)
    lease = await started(backend, engine)
    assert await backend.engine("e3").reap(4) == []
    found: list[Lease] = []

    async def reaped() -> bool:
        found.extend(await other.reap(4))
        return bool(found)

    await eventually(reaped)
    assert found[0].request == lease.request


async def test_only_the_owner_is_released(backend: Backend) -> None:
    engine, other = backend.engine("e1"), backend.engine("e2")
    lease = await started(backend, engine)
    gateway = backend.gateway()
    for engine_id, attempt in (("e2", 1), ("e1", 2)):
        await gateway.release(lease.request.request_id, MODEL, engine_id, attempt)
    assert await other.reap(4) == []


async def test_the_journal_is_the_beats_and_the_frames_behind(backend: Backend) -> None:
    engine = backend.engine()
    lease = await started(backend, engine)
    assert (await beat(engine, progress(lease, 10, 11))).journaled == (2,)
    assert (await beat(engine, progress(lease, 12, journaled=2))).journaled == (3,)
    await engine.publish({"g": [tokens(lease, 2, 12, 13)], "other": []})
    await engine.publish({"g": [tokens(lease, 9, 99)]})  # behind a gap
    found = await backend.engine("e2").journal(lease.request.request_id)
    assert found == (ChoiceState(token_ids=(10, 11, 12, 13)),)


async def test_a_beat_repeated_or_behind_a_gap_leaves_the_journal_whole(backend: Backend) -> None:
    engine = backend.engine()
    lease = await started(backend, engine)
    for _ in range(2):
        assert (await beat(engine, progress(lease, 10, 11))).journaled == (2,)
    assert (await beat(engine, progress(lease, 50, journaled=9))).journaled == (2,)
    found = await engine.journal(lease.request.request_id)
    assert found == (ChoiceState(token_ids=(10, 11)),)


async def test_the_journal_never_mixes_histories(backend: Backend) -> None:
    """Gateway killed, engine moved, then killed before it could sync (PROTOCOL 4.4.1)."""
    engine, other = backend.engine("e1"), backend.engine("e2")
    lease = await started(backend, engine)
    await beat(engine, progress(lease, 1, 2))
    await engine.publish({"g": [tokens(lease, 2, 3, 4)]})
    again = await moved(backend, lease, engine, other)
    rid = lease.request.request_id
    assert (await beat(other, progress(again, 7, 7, 7))).journaled == (0,)
    assert await other.journal(rid) == (ChoiceState(token_ids=(1, 2, 3, 4)),)
    await other.publish({"g": [Takeover(request_id=rid, attempt=2)]})
    assert await other.resume(rid, 2, [ChoiceState(token_ids=(1, 2, 3))])
    assert await other.journal(rid) == (ChoiceState(token_ids=(1, 2, 3)),)
    await backend.gateway("g2").admit(lease.request, LIMITS)
    await engine.publish({"g": [tokens(lease, 3, 4, 5, 6)]})  # the frozen one wakes
    states = (ChoiceState(token_ids=(1, 2, 3, 40)),)
    await other.publish({"g2": [Sync(request_id=rid, attempt=2, choices=states)]})
    await other.publish({"g2": [tokens(again, 4, 50)]})
    assert await other.journal(rid) == (ChoiceState(token_ids=(1, 2, 3, 40, 50)),)


async def test_the_journal_keeps_how_a_choice_ended(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await gateway.admit(make_request(n=2), LIMITS)
    (lease,) = await engine.take(1)
    item = Progress(
        request_id=lease.request.request_id,
        attempt=1,
        journaled=(0, 0),
        choices=(
            ChoiceState(token_ids=(4,), finish_reason="stop", stop_token=2),
            ChoiceState(token_ids=(5, 6)),
        ),
    )
    assert (await beat(engine, item)).journaled == (1, 2)
    assert await engine.journal(lease.request.request_id) == item.choices
    assert await engine.resume(lease.request.request_id, 1, item.choices)
    assert await engine.journal(lease.request.request_id) == item.choices
    assert await engine.journal("0.unknown") is None


async def test_poison_becomes_a_dead_letter(backend: Backend) -> None:
    engines = [backend.engine(f"e{number}") for number in range(6)]
    lease = await started(backend, engines[0])
    suspects = []
    for old, new in zip(engines, engines[1:4], strict=False):
        await beat(old, progress(lease))
        lease = await moved(backend, lease, old, new)
        suspects.append(lease.suspect)
    assert suspects == [False, True, True]
    await beat(engines[3], progress(lease))
    gateway = backend.gateway()
    await gateway.release(lease.request.request_id, MODEL, "e3", lease.attempt)
    assert await engines[4].reap(4) == []
    (frame,) = await first(gateway.frames(), 1)
    assert isinstance(frame.replies[0], Failed)
    assert frame.replies[0].failure is FailureCode.POISONED
    assert await backend.dead_letters() == [(lease.request.request_id, "poisoned")]
    ended = await gateway.admit(lease.request, LIMITS, seen=4)
    assert ended.outcome is not None and ended.outcome.failed is not None
    assert ended.outcome.failed.failure is FailureCode.POISONED


async def test_a_suspect_is_left_where_it_is_not_wanted(backend: Backend) -> None:
    engines = [backend.engine(f"e{number}") for number in range(4)]
    lease = await started(backend, engines[0])
    for old, new in zip(engines, engines[1:2], strict=False):
        await beat(old, progress(lease))
        lease = await moved(backend, lease, old, new)
    await beat(engines[1], progress(lease))
    await backend.gateway().release(lease.request.request_id, MODEL, "e1", 2)
    assert await engines[2].reap(4, suspects=False) == []
    assert [item.suspect for item in await engines[2].reap(4)] == [True]


async def test_innocents_are_not_counted(backend: Backend) -> None:
    """Neither those that made tokens, nor those that only waited, nor those given back."""
    engines = [backend.engine(f"e{number}") for number in range(14)]
    lease = await started(backend, engines[0])
    rid = lease.request.request_id
    made: list[int] = []
    for number, (old, new) in enumerate(zip(engines, engines[1:], strict=False)):
        await old.resume(rid, lease.attempt, [ChoiceState(token_ids=tuple(made))])
        if number % 3 == 0:
            await beat(old, progress(lease, number, journaled=len(made)))
            made.append(number)
        elif number % 3 == 1:
            await old.give_back([rid])
        else:
            lease = await moved(backend, lease, old, new)
            await backend.gateway().release(rid, MODEL, new.engine_id, lease.attempt)
            (lease,) = await engines[13].reap(1)
            await engines[13].give_back([rid])
        if number % 3 == 0:
            lease = await moved(backend, lease, old, new)
        else:
            (lease,) = await new.reap(1)
        assert not lease.suspect


async def test_frames_come_in_order_and_again_from_the_start(backend: Backend) -> None:
    engine = backend.engine()
    lease = await started(backend, engine)
    said: Sequence[Tokens] = [tokens(lease, index, index) for index in range(5)]
    for item in said:
        await engine.publish({"g": [item]})
    gateway = backend.gateway()
    for _ in range(2):
        frames = await first(gateway.frames(), 5)
        assert [frame.replies[0] for frame in frames] == list(said)
        assert {frame.engine_id for frame in frames} == {"e"}


async def test_depth_and_engines_are_told(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await engine.start()
    assert await gateway.engines(MODEL) == []
    assert await gateway.drain_rate(MODEL) == 0
    for _ in range(3):
        await gateway.admit(make_request(), LIMITS)
    await engine.take(1)
    depth = await gateway.depth(MODEL)
    assert (depth.waiting, depth.pending, depth.waiting_tokens) == (2, 1, 38)
    assert 0 <= depth.oldest_age < 60
    await engine.beat([], make_status())
    assert await gateway.engines(MODEL) == [replace(make_status(), shards=backend.shards)]
    await engine.close()
    assert await backend.gateway("g2").engines(MODEL) == []


async def test_a_gateway_lives_while_it_beats(backend: Backend) -> None:
    gateway, engine = backend.gateway("g9"), backend.engine()
    assert not await engine.gateway_alive("g9")
    await gateway.start()
    assert await engine.gateway_alive("g9")


async def test_after_a_loss_of_everything_requests_go_on(backend: Backend) -> None:
    engine = backend.engine("e1")
    lease = await started(backend, engine)
    await backend.wipe()
    assert (await beat(engine, progress(lease, 1))).verdict is Verdict.MISSING
    assert not await engine.finish(lease.request.request_id, 1, done(1))
    gateway = backend.gateway()
    assert await engine.take(1) == [] and await engine.reap(1) == []
    await gateway.admit(lease.request, LIMITS, seen=1)
    (again,) = await backend.engine("e2").take(1)
    assert (again.attempt, again.recovered) == (2, True)


async def test_a_lease_given_twice_under_one_number_asks_first(backend: Backend) -> None:
    engine = backend.engine("e1")
    lease = await started(backend, engine)
    await backend.wipe()
    await backend.gateway().admit(lease.request, LIMITS)  # as a rollback: nothing seen
    (again,) = await engine.take(1)
    assert (again.attempt, again.recovered) == (1, True)


async def test_who_asks_politely_leaves_a_request_with_its_gateway(backend: Backend) -> None:
    engine = backend.engine()
    lease = await started(backend, engine)
    other = backend.gateway("g2")
    held = await other.admit(lease.request, LIMITS, polite=True)
    assert (held.state, held.gateway_id) == (AdmitState.HELD, "g")
    assert (held.owner, held.attempt) == ("e", 1)
    assert (await beat(engine, progress(lease, 1))).gateway_id == "g"
    own = await backend.gateway("g").admit(lease.request, LIMITS, polite=True)
    assert own.state is AdmitState.ATTACHED
    await engine.finish(lease.request.request_id, 1, done(1))
    assert (await other.admit(lease.request, LIMITS, polite=True)).outcome == done(1)


async def test_another_gateways_replies_can_be_followed(backend: Backend) -> None:
    engine = backend.engine()
    lease = await started(backend, engine)
    await engine.publish({"g": [tokens(lease, 0, 1)]})
    frames = await backend.gateway("g2").frames_to("g")
    await engine.publish({"other": [tokens(lease, 0, 9)]})
    await engine.publish({"g": [tokens(lease, 1, 2)]})
    (frame,) = await first(frames, 1)
    assert frame.replies == (tokens(lease, 1, 2),)


async def test_a_gateway_that_closes_is_gone_at_once(backend: Backend) -> None:
    gateway, observer = backend.gateway("g1"), backend.gateway("g2")
    await gateway.start()
    assert await observer.gateway_alive("g1")
    await gateway.close()
    assert not await observer.gateway_alive("g1")


async def test_anyone_can_tell_where_a_request_is(backend: Backend) -> None:
    gateway, engine = backend.gateway("g1"), backend.engine()
    observer = backend.gateway("g2")
    request = make_request()
    rid = request.request_id
    assert await observer.standing(rid, MODEL) is None
    await gateway.admit(request, LIMITS)
    assert await observer.standing(rid, MODEL) == Standing(started=False)
    await engine.take(1)
    assert await observer.standing(rid, MODEL) == Standing(started=True)
    await engine.finish(rid, 1, done(1, 2))
    assert await observer.standing(rid, MODEL) == Standing(started=True, outcome=done(1, 2))


async def test_a_cancelled_request_stands_as_that(backend: Backend) -> None:
    gateway = backend.gateway()
    request = make_request()
    await gateway.admit(request, LIMITS)
    await gateway.cancel(request.request_id, MODEL)
    standing = await gateway.standing(request.request_id, MODEL)
    assert standing is not None and standing.outcome is not None
    assert standing.outcome.failed is not None
    assert standing.outcome.failed.failure is FailureCode.CANCELLED


async def test_a_lost_request_goes_on_for_its_gateway(backend: Backend) -> None:
    engine, other = backend.engine("e1"), backend.engine("e2")
    lease = await started(backend, engine)
    gateway, follower = backend.gateway("g"), backend.gateway("g2")
    rid = lease.request.request_id
    await beat(engine, progress(lease, 5, 6))
    assert await engine.finish(rid, 1, lost(lease))
    assert await follower.standing(rid, MODEL) == Standing(started=True)
    held = await follower.admit(lease.request, LIMITS, seen=1, polite=True)
    assert (held.state, held.gateway_id, held.owner) == (AdmitState.HELD, "g", None)
    over = replace(lease.request, deadline_ms=1)
    assert (await gateway.admit(over, LIMITS, seen=1)).state is AdmitState.ENDED
    assert (await gateway.admit(lease.request, LIMITS, seen=1)).state is AdmitState.ADMITTED
    assert (await gateway.admit(lease.request, LIMITS, seen=1)).state is AdmitState.ATTACHED
    assert not await engine.finish(rid, 1, lost(lease))
    assert await follower.standing(rid, MODEL) == Standing(started=False)
    (again,) = await other.take(2)
    assert again == Lease(request=lease.request, attempt=2, gateway_id="g", recovered=True)
    assert await other.journal(rid) is None  # what others had made is of another history
    assert await other.finish(rid, 2, done(5, 6, 7))
    assert (await gateway.admit(lease.request, LIMITS, seen=2)).outcome == done(5, 6, 7)
    assert (await gateway.depth(MODEL)).pending == 0


async def test_a_request_that_is_always_lost_ends(backend: Backend) -> None:
    engine, gateway = backend.engine(), backend.gateway()
    lease = await started(backend, engine)
    for attempt in range(1, MOST_ANEW + 1):
        await engine.finish(lease.request.request_id, attempt, lost(lease))
        admission = await gateway.admit(lease.request, LIMITS, seen=attempt)
        assert admission.state is AdmitState.ADMITTED
        (lease,) = await engine.take(1)
    await engine.finish(lease.request.request_id, lease.attempt, lost(lease))
    admission = await gateway.admit(lease.request, LIMITS, seen=lease.attempt)
    assert (admission.state, admission.outcome) == (AdmitState.ENDED, lost(lease))


async def test_a_lost_request_that_is_cancelled_stays_that(backend: Backend) -> None:
    engine, gateway = backend.engine(), backend.gateway()
    lease = await started(backend, engine)
    await engine.finish(lease.request.request_id, 1, lost(lease))
    await gateway.cancel(lease.request.request_id, MODEL)
    admission = await gateway.admit(lease.request, LIMITS, seen=1)
    assert admission.outcome is not None and admission.outcome.failed is not None
    assert admission.outcome.failed.failure is FailureCode.CANCELLED
    assert await engine.take(1) == []


async def test_an_abandoned_request_goes_on_for_who_has_it(backend: Backend) -> None:
    """Not for somebody new: that one may begin anew, as behind a cancelled one."""
    engine, other = backend.engine(), backend.gateway("g2")
    lease = await started(backend, engine)
    abandoned = failed(lease.request.request_id, 1, FailureCode.ABANDONED)
    await engine.finish(lease.request.request_id, 1, Outcome(failed=abandoned))
    new = await other.admit(lease.request, LIMITS, polite=True)
    assert (new.state, new.outcome) == (AdmitState.ENDED, Outcome(failed=abandoned))
    seen = await other.admit(lease.request, LIMITS, seen=1, polite=True)
    assert seen.state is AdmitState.ADMITTED
    (again,) = await engine.take(1)
    assert (again.attempt, again.gateway_id, again.recovered) == (2, "g2", True)


async def test_an_outcome_of_another_history_is_made_anew_once(backend: Backend) -> None:
    engine, gateway = backend.engine(), backend.gateway()
    lease = await started(backend, engine)
    rid = lease.request.request_id
    await engine.finish(rid, 1, done(9, 9))
    ended = await gateway.admit(lease.request, LIMITS, seen=1)
    assert (ended.state, ended.attempt, ended.outcome) == (AdmitState.ENDED, 1, done(9, 9))
    anew = await gateway.admit(lease.request, LIMITS, seen=1, disputed=True)
    assert anew.state is AdmitState.ADMITTED
    (again,) = await engine.take(1)
    assert (again.attempt, again.recovered) == (2, True)
    await engine.finish(rid, 2, done(5, 6))
    repeated = await gateway.admit(lease.request, LIMITS, seen=1, disputed=True)
    assert (repeated.state, repeated.outcome) == (AdmitState.ENDED, done(5, 6))


async def test_an_outcome_that_somebody_was_given_stands(backend: Backend) -> None:
    engine, gateway, other = backend.engine(), backend.gateway(), backend.gateway("g2")

    async def give(request: GenerateRequest, how: str) -> None:
        match how:
            case "asked":
                found = await other.give_out(request.request_id, MODEL)
                assert found == Standing(started=True, outcome=done(9, 9))
            case "sent again":
                again = await other.admit(request, LIMITS, polite=True)
                assert again.outcome == done(9, 9)
            case "follows":
                await other.admit(request, LIMITS, polite=True)
            case "took over":
                await other.admit(request, LIMITS, seen=1)

    for how in ("asked", "sent again", "follows", "took over"):
        request = (await started(backend, engine)).request
        if how in ("follows", "took over"):
            await give(request, how)
        await engine.finish(request.request_id, 1, done(9, 9))
        if how in ("asked", "sent again"):
            await give(request, how)
        disputed = await gateway.admit(request, LIMITS, seen=1, disputed=True)
        assert (disputed.state, disputed.outcome) == (AdmitState.ENDED, done(9, 9)), how
    assert await engine.take(1) == []


async def test_log_probabilities_survive_with_their_tokens(backend: Backend) -> None:
    """In the journal, in frames behind it, and through RESUME and FINISH."""
    engine, other = backend.engine("e1"), backend.engine("e2")
    lease = await started(backend, engine)
    rid = lease.request.request_id
    known = tuple(Logprobs(-0.1 * i, i + 1, ((i, -0.1), (7, -9.5))) for i in range(4))
    said = ChoiceState(token_ids=(1, 2), logprobs=known[:2])
    await beat(engine, replace(progress(lease), choices=(said,)))
    more = ChoiceState(token_ids=(3,), logprobs=known[2:3])
    await beat(engine, replace(progress(lease, journaled=2), choices=(more,)))
    await engine.publish({"g": [tokens(lease, 3, 4)._replace(logprobs=known[3:])]})
    whole = ChoiceState(token_ids=(1, 2, 3, 4), logprobs=known)
    assert await other.journal(rid) == (whole,)
    assert await backend.gateway("g2").journal(rid, MODEL) == (whole,)
    await moved(backend, lease, engine, other)
    assert await other.resume(rid, 2, [whole])
    await other.publish({"g": [Takeover(request_id=rid, attempt=2)]})
    assert await other.journal(rid) == (whole,)
    outcome = Outcome(choices=(replace(whole, finish_reason="length"),))
    await other.finish(rid, 2, outcome)
    standing = await backend.gateway("g2").standing(rid, MODEL)
    assert standing == Standing(started=True, outcome=outcome)


async def test_log_probabilities_of_other_tokens_are_not_taken(backend: Backend) -> None:
    """A beat was lost on the way and the next one says more, without them."""
    engine = backend.engine()
    lease = await started(backend, engine)
    said = ChoiceState(token_ids=(1, 2), logprobs=(Logprobs(-1, 1, ()), Logprobs(-2, 1, ())))
    await beat(engine, replace(progress(lease), choices=(said,)))
    await beat(engine, progress(lease, 1, 2, 3))
    (found,) = await engine.journal(lease.request.request_id) or ()
    assert (found.token_ids, found.logprobs) == ((1, 2, 3), None)
