"""Helpers of the tests of the queue's promises: the backends, and single steps of a request.

A test module takes `pytestmark = ON_ALL_BACKENDS`.
"""

from typing import Any

import pytest

from headrace_common.errors import FailureCode
from headrace_common.protocol.base import Beat, EngineQueue, Lease, Outcome, Progress, QueueLimits
from headrace_common.protocol.failures import failed
from headrace_common.wire.messages import ChoiceState, Tokens
from headrace_testing.backends import MODEL, Backend, make_request, make_status

LIMITS = QueueLimits()

# The contract must hold in the last of several shards as well as in the only shard.
ON_ALL_BACKENDS = [
    pytest.mark.parametrize(
        "backend",
        [
            *("memory", "redis", "sentinel", "cluster", "users", "users by model"),
            *("memory*3", "redis*3", "cluster*3"),
        ],
        indirect=True,
    ),
    pytest.mark.usefixtures("in_the_last_shard"),
]


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
