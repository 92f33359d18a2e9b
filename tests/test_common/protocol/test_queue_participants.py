"""What gateways and engines know about each other and about the amount of work.

On every backend of the queue. What only Redis can do is elsewhere.
"""

from collections.abc import Sequence
from dataclasses import replace

from headrace_common.protocol.base import AdmitState
from headrace_common.wire.messages import Tokens
from headrace_testing.backends import MODEL, Backend, make_request, make_status
from headrace_testing.queue_contract import (
    LIMITS,
    ON_ALL_BACKENDS,
    beat,
    done,
    progress,
    started,
    tokens,
)
from headrace_testing.waiting import first

pytestmark = ON_ALL_BACKENDS


async def test_frames_come_in_order_and_again_from_the_start(backend: Backend) -> None:
    engine = backend.engine()
    lease = await started(backend, engine)
    sent: Sequence[Tokens] = [tokens(lease, index, index) for index in range(5)]
    for item in sent:
        await engine.publish({"g": [item]})
    gateway = backend.gateway()
    for _ in range(2):
        frames = await first(gateway.frames(), 5)
        assert [frame.replies[0] for frame in frames] == list(sent)
        assert {frame.engine_id for frame in frames} == {"e"}


async def test_depth_and_engines_are_reported(backend: Backend) -> None:
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


async def test_a_conditional_admission_leaves_a_request_with_its_gateway(backend: Backend) -> None:
    engine = backend.engine()
    lease = await started(backend, engine)
    other = backend.gateway("g2")
    held = await other.admit(lease.request, LIMITS, polite=True)
    assert (held.state, held.gateway_id) == (AdmitState.FOLLOWING, "g")
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
    frames = await backend.gateway("g2").frames_to("g", MODEL)
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
