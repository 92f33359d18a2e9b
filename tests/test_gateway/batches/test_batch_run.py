"""One batch against an API that answers from a script: waiting, retrying, taking over."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from headrace_common.protocol.batches import BatchRequest, BatchStatus, StoredFile, TokenUsage
from headrace_common.protocol.redis.batches import RedisBatches
from headrace_common.protocol.redis.files import RedisFiles
from headrace_common.wire import keys
from headrace_gateway.batches.internal import InternalClient
from headrace_gateway.batches.results import PAGE_BYTES, pages_of, usage_of
from headrace_gateway.batches.run import BatchContext, BatchLimits, BatchRun, LeaseLost
from headrace_gateway.generation.resumable_response import ResumableRequests
from headrace_gateway.http.app import never_full
from headrace_gateway.limits.tenant_stores import StoreLimits, TenantStores
from headrace_testing.backends import OverRedis
from headrace_testing.batches import jsonl, line, parsed
from headrace_testing.valkey import ValkeyServer

LIMITS = StoreLimits(
    tenant_bytes=2**20,
    requests=10,
    embedding_bytes=2**20,
    file_bytes=2**20,
    files=10,
    memory_share=1.0,
)
AT_ONCE = {"retry-after": "0"}
NOW = 1_000_000_000
FAR = 4_000_000_000


class ScriptedApi:
    """Answers each request with the next of `answers`, and then always with the last one."""

    def __init__(self, *answers: tuple[int, dict[str, str]]) -> None:
        self._answers = list(answers)
        self.keys: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        self.keys.append(headers[b"idempotency-key"].decode())
        status, more = self._answers[0]
        if len(self._answers) > 1:
            del self._answers[0]
        await JSONResponse({"n": len(self.keys)}, status, more)(scope, receive, send)


class Counted:
    """The metrics of batches."""

    def __init__(self) -> None:
        self.requests: list[bool] = []
        self.ended: list[str] = []

    def batch_request(self, *, answered: bool) -> None:
        self.requests.append(answered)

    def batch_ended(self, state: str) -> None:
        self.ended.append(state)


class Stand:
    """One batch with this number of lines, which gateway `leader` leads."""

    def __init__(self, over: OverRedis, api: ScriptedApi) -> None:
        unused: Any = None
        self.counted = Counted()
        connection = over.connect()
        self.batches = RedisBatches(connection)
        self.files = RedisFiles(connection)
        self.context = BatchContext(
            leader="g1",
            batches=self.batches,
            files=self.files,
            client=InternalClient(api),
            stores=TenantStores(over.accounts(), LIMITS, never_full),
            resumable=ResumableRequests(
                None, models=unused, observer=unused, delivery=unused, drain=unused
            ),
            metrics=self.counted,
            find_key=None,
            limits=BatchLimits(
                max_lines=100,
                max_line_bytes=2**16,
                max_output_bytes=2**20,
                concurrency=1,
                max_deadline=10.0,
            ),
            clock=connection.clock.now,
        )

    async def run(self, names: Sequence[str]) -> tuple[BatchStatus, dict[str, dict[str, Any]]]:
        """Runs the batch to its end; returns the batch and the lines of its two files."""
        content = jsonl([line(name) for name in names])
        file = StoredFile(
            id="file-1",
            tenant="t",
            filename="in",
            purpose="batch",
            bytes=len(content),
            chunks=1,
            created_at=NOW,
            expires_at=FAR,
        )
        await self.files.write(file, [(0, content)])
        await self.files.finish(file)
        request = BatchRequest(
            id="batch_1",
            tenant="t",
            key_id="",
            endpoint="/v1/completions",
            input_file_id=file.id,
            completion_window="24h",
            created_at=NOW,
            expires_at=FAR,
            output_ttl=10**9,
            kept_until=FAR,
        )
        batch = await self.batches.create(request)
        await BatchRun(self.context, batch).run()
        progress = (await self.batches.get(request.id)).progress
        found: dict[str, dict[str, Any]] = {}
        for name in (progress.output_file_id, progress.error_file_id):
            if name is not None:
                made = await self.files.get(name, "t")
                found |= parsed(await self.files.content(made))
        return progress.status, found


@pytest.fixture
async def over(valkey: ValkeyServer) -> Any:
    over = OverRedis(valkey.url)
    await over.wipe()
    yield over
    await over.close()


async def test_a_full_service_is_waited_for(over: OverRedis) -> None:
    api = ScriptedApi((503, AT_ONCE), (429, AT_ONCE), (200, {}))

    status, found = await Stand(over, api).run(["a"])

    assert status is BatchStatus.COMPLETED
    assert found["a"]["response"] == {"status_code": 200, "request_id": "", "body": {"n": 3}}
    # every gateway that repeats the line sends the same request
    assert api.keys == ["batch_1:1"] * 3


async def test_a_line_that_failed_temporarily_is_tried_again(over: OverRedis) -> None:
    _, found = await Stand(over, ScriptedApi((500, {}), (500, {}), (200, {}))).run(["a"])

    assert found["a"]["response"]["status_code"] == 200


async def test_a_line_that_keeps_failing_is_reported(over: OverRedis) -> None:
    api = ScriptedApi((500, {}))

    _, found = await Stand(over, api).run(["a"])

    assert found["a"]["response"]["status_code"] == 500 and len(api.keys) == 3


async def test_an_api_that_fails_after_its_answer_fails_the_line_alone(over: OverRedis) -> None:
    class Failing(ScriptedApi):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await super().__call__(scope, receive, send)
            if self.keys[-1].endswith(":1"):
                raise RuntimeError("as Starlette does after an internal error's answer")

    status, found = await Stand(over, Failing((500, {}), (500, {}), (500, {}), (200, {}))).run(
        ["a", "b"]
    )

    assert status is BatchStatus.COMPLETED
    assert found["a"]["response"]["status_code"] == 500
    assert found["b"]["response"]["status_code"] == 200


async def test_a_line_that_is_too_long_is_not_parsed(over: OverRedis) -> None:
    stand = Stand(over, ScriptedApi((200, {})))

    status, _ = await stand.run(["a", "b" * stand.context.limits.max_line_bytes])

    (error,) = (await stand.batches.get("batch_1")).progress.errors
    assert status is BatchStatus.FAILED
    assert (error["code"], error["line"]) == ("request_too_large", 2)


async def test_a_line_that_would_fail_again_is_not_tried_again(over: OverRedis) -> None:
    api = ScriptedApi((504, {"x-should-retry": "false"}), (200, {}))

    _, found = await Stand(over, api).run(["a", "b"])

    assert found["a"]["response"]["status_code"] == 504 and len(api.keys) == 2
    assert found["b"]["response"]["status_code"] == 200


async def test_lines_with_a_result_are_not_run_again(over: OverRedis) -> None:
    api = ScriptedApi((200, {}))
    known = b'{"custom_id":"a","known":true}'
    await over.client.command("HSET", keys.batch_results("batch_1"), 1, known)
    await over.client.command("HSET", keys.batch_marks("batch_1"), 1, f"1:{len(known)}")

    status, found = await Stand(over, api).run(["a", "b"])

    assert status is BatchStatus.COMPLETED
    assert found["a"]["known"] and found["b"]["response"]["status_code"] == 200
    assert api.keys == ["batch_1:2"]


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (
            {"usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}},
            TokenUsage(5, 0, 2, 0),
        ),
        (
            {
                "text": 'it says "usage":{"prompt_tokens":9}',
                "usage": {
                    "input_tokens": 5,
                    "input_tokens_details": {"cached_tokens": 4},
                    "output_tokens": 3,
                    "output_tokens_details": {"reasoning_tokens": 1},
                },
                "metadata": {"usage": "mine"},
                "tools": [{"usage": {"type": "string"}}, {"usage": {"input_tokens": "x"}}],
            },
            TokenUsage(5, 4, 3, 1),
        ),
        ({"data": [], "usage": {"prompt_tokens": 8, "total_tokens": 8}}, TokenUsage(8)),
        ({"usage": None}, TokenUsage()),
        ({}, TokenUsage()),
    ],
)
def test_the_usage_of_an_answer_is_found(body: dict[str, Any], usage: TokenUsage) -> None:
    assert usage_of(json.dumps(body, separators=(",", ":")).encode()) == usage


def test_large_results_are_not_read_together() -> None:
    half = PAGE_BYTES // 2
    sizes = {1: half, 2: half, 3: 1, 4: 3 * PAGE_BYTES, 5: 1}

    assert list(pages_of(sizes)) == [[1, 2], [3], [4], [5]]


async def test_usage_continues_from_the_previous_leaders_count(over: OverRedis) -> None:
    stand = Stand(over, ScriptedApi((200, {})))
    known = b'{"custom_id":"a"}'
    await over.client.command("HSET", keys.batch_results("batch_1"), 1, known)
    await over.client.command("HSET", keys.batch_marks("batch_1"), 1, f"1:{len(known)}")
    await over.client.command("HSET", keys.batch_usage("batch_1"), 1, "5:4:3:2")

    await stand.run(["a", "b"])

    progress = (await stand.batches.get("batch_1")).progress
    assert (progress.completed, progress.input_tokens, progress.reasoning_tokens) == (2, 5, 2)


async def test_metrics_count_each_line_once(over: OverRedis) -> None:
    """A gateway does not count a line that was already done."""
    stand = Stand(over, ScriptedApi((200, {}), (400, {}), (200, {})))
    await stand.run(["a", "b"])
    assert not await stand.batches.all_open()
    batch = await stand.batches.get("batch_1")

    await BatchRun(stand.context, batch).run()

    assert stand.counted.requests == [True, False]
    assert stand.counted.ended == ["completed"]
    assert await stand.batches.keep(batch, 3, b"{}", answered=True)
    assert not await stand.batches.keep(batch, 3, b"{}", answered=True)


async def test_open_batches_are_found(over: OverRedis) -> None:
    stand = Stand(over, ScriptedApi((503, AT_ONCE)))
    assert await stand.batches.lead("batch_1", "another")
    with pytest.raises(LeaseLost):
        await stand.run(["a", "b"])

    (batch,) = await stand.batches.all_open()

    assert (batch.state, batch.left) == ("in_progress", 2)
    await stand.batches.cancel(batch)
    assert [each.state for each in await stand.batches.all_open()] == ["cancelling"]


async def test_a_leader_that_lost_its_lease_stops(over: OverRedis) -> None:
    stand = Stand(over, ScriptedApi((503, AT_ONCE)))
    assert await stand.batches.lead("batch_1", "another")

    with pytest.raises(LeaseLost):
        await stand.run(["a"])

    assert not await stand.batches.lead("batch_1", "g1")
    await stand.batches.leave("batch_1", "another")
    assert await stand.batches.lead("batch_1", "g1")
