"""Replies and outcomes reach Redis in order, each once, also if Redis is unreachable for a
while."""

import asyncio
from collections.abc import AsyncIterator
from unittest.mock import AsyncMock, call

import pytest

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.base import EngineQueue, Outcome
from headrace_common.protocol.ledger import AttemptUsage
from headrace_common.wire.messages import Tokens
from headrace_engine.serving import reply_writer
from headrace_engine.serving.reply_writer import ReplyWriter


@pytest.fixture
async def queue(monkeypatch: pytest.MonkeyPatch) -> AsyncMock:
    monkeypatch.setattr(reply_writer, "backoff", AsyncMock())
    return AsyncMock(spec=EngineQueue)


@pytest.fixture
async def writer(queue: AsyncMock) -> AsyncIterator[ReplyWriter]:
    writer = ReplyWriter(queue)
    task = asyncio.create_task(writer.run())
    yield writer
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def token(index: int) -> Tokens:
    return Tokens("r", 1, 0, index, (5,))


async def test_replies_become_one_frame_for_each_gateway(
    writer: ReplyWriter, queue: AsyncMock
) -> None:
    writer.put("a", token(0))
    writer.put("b", token(0))
    writer.put("a", token(1))

    await writer.flush()

    queue.publish.assert_awaited_once_with({"a": [token(0), token(1)], "b": [token(0)]})


async def test_an_outcome_is_stored_after_the_replies_before_it(
    writer: ReplyWriter, queue: AsyncMock
) -> None:
    outcome = Outcome(cached_tokens=3)
    usage = AttemptUsage(engine_ms=5)
    writer.end("r", 1, outcome, usage)
    writer.put("a", token(0))

    await writer.flush()

    assert queue.mock_calls == [
        call.publish({"a": [token(0)]}),
        call.finish("r", 1, outcome, usage),
    ]


async def test_nothing_is_lost_while_redis_is_unreachable(
    writer: ReplyWriter, queue: AsyncMock
) -> None:
    away = BackendUnavailable("away")
    queue.publish.side_effect = [away, away, None]
    queue.finish.side_effect = [away, True]
    writer.put("a", token(0))
    writer.end("r", 1, Outcome(), AttemptUsage())

    await writer.flush()

    assert queue.mock_calls == 3 * [call.publish({"a": [token(0)]})] + 2 * [
        call.finish("r", 1, Outcome(), AttemptUsage())
    ]


async def test_a_gateway_without_replies_gets_an_empty_frame(
    writer: ReplyWriter, queue: AsyncMock
) -> None:
    writer.put("busy", token(0))
    await writer.flush()

    for gateway_id in ("busy", "quiet"):
        writer.keep_alive(gateway_id, 600.0)
    await writer.flush()
    assert queue.publish.await_args == call({"quiet": []})

    writer.keep_alive("busy", 0.0)
    await writer.flush()
    assert queue.publish.await_args == call({"busy": []})
