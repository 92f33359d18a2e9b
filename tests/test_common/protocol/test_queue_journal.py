"""The journal, from which a request without a gateway is rebuilt: tokens, log probabilities,
endings.

On every backend of the queue. What only Redis can do is elsewhere.
"""

from dataclasses import replace

from headrace_common.protocol.base import Outcome, Progress, RequestStatus
from headrace_common.wire.messages import ChoiceState, Logprobs, Sync, Takeover
from headrace_testing.backends import MODEL, Backend, make_request
from headrace_testing.queue_contract import (
    LIMITS,
    ON_ALL_BACKENDS,
    beat,
    moved,
    progress,
    started,
    tokens,
)

pytestmark = ON_ALL_BACKENDS


async def test_the_journal_has_the_tokens_of_beats_and_of_later_frames(backend: Backend) -> None:
    engine = backend.engine()
    lease = await started(backend, engine)
    assert (await beat(engine, progress(lease, 10, 11))).journaled == (2,)
    assert (await beat(engine, progress(lease, 12, journaled=2))).journaled == (3,)
    await engine.publish({"g": [tokens(lease, 2, 12, 13)], "other": []})
    await engine.publish({"g": [tokens(lease, 9, 99)]})  # after a gap
    found = await backend.engine("e2").journal(lease.request.request_id)
    assert found == (ChoiceState(token_ids=(10, 11, 12, 13)),)


async def test_a_beat_that_is_repeated_or_follows_a_gap_leaves_the_journal_complete(
    backend: Backend,
) -> None:
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
    await engine.publish({"g": [tokens(lease, 3, 4, 5, 6)]})  # the frozen one wakes up
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


async def test_log_probabilities_survive_with_their_tokens(backend: Backend) -> None:
    """They survive in the journal, in the frames after it, and through RESUME and FINISH."""
    engine, other = backend.engine("e1"), backend.engine("e2")
    lease = await started(backend, engine)
    rid = lease.request.request_id
    known = tuple(Logprobs(-0.1 * i, i + 1, ((i, -0.1), (7, -9.5))) for i in range(4))
    state = ChoiceState(token_ids=(1, 2), logprobs=known[:2])
    await beat(engine, replace(progress(lease), choices=(state,)))
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
    request_status = await backend.gateway("g2").request_status(rid, MODEL)
    assert request_status == RequestStatus(started=True, outcome=outcome)


async def test_log_probabilities_of_other_tokens_are_not_taken(backend: Backend) -> None:
    """A beat was lost, and the next one has more tokens without log probabilities."""
    engine = backend.engine()
    lease = await started(backend, engine)
    state = ChoiceState(token_ids=(1, 2), logprobs=(Logprobs(-1, 1, ()), Logprobs(-2, 1, ())))
    await beat(engine, replace(progress(lease), choices=(state,)))
    await beat(engine, progress(lease, 1, 2, 3))
    (found,) = await engine.journal(lease.request.request_id) or ()
    assert (found.token_ids, found.logprobs) == ((1, 2, 3), None)
