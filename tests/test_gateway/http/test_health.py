"""Liveness means that the process runs; readiness, that an engine is working or idle."""

import time
from pathlib import Path

import pytest

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.redis.clock import RedisClock
from headrace_testing.gateway import MODEL, Gateway, engine_status, serve

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_ready_if_an_engine_is_idle_or_runs_steps(gateway: Gateway) -> None:
    for age in (0.0, 59.0):
        gateway.engine.statuses = [engine_status(last_step_age=age, running=1)]
        gateway.forget_engines()
        assert (await gateway.http.get("/health/ready")).status_code == 200


@pytest.mark.parametrize(
    ("statuses", "reason"),
    [
        ([], "no engine serves tiny"),
        ([engine_status(draining=True)], "all 1 engines of tiny are draining"),
        ([engine_status(last_step_age=61.0)], "no engine of tiny has made a step for 60 s"),
        (
            [engine_status(draining=True), engine_status(last_step_age=61.0)],
            "no engine of tiny has made a step for 60 s",
        ),
    ],
)
async def test_not_ready_names_the_reason(
    gateway: Gateway, statuses: list[object], reason: str
) -> None:
    gateway.engine.statuses = statuses  # type: ignore[assignment]

    answer = await gateway.http.get("/health/ready")

    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == f"Not ready: {reason}."


async def test_not_ready_without_the_queue_but_live(gateway: Gateway) -> None:
    gateway.engine.unreachable = BackendUnavailable("gone")

    answer = await gateway.http.get("/health/ready")

    assert "queue cannot be reached" in answer.json()["error"]["message"]
    for path in ("/health/live", "/health"):
        assert (await gateway.http.get(path)).json() == {"status": "ok"}


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/version", "/v1/models"])
async def test_monitors_may_request_only_the_head(gateway: Gateway, path: str) -> None:
    whole, head = [await gateway.http.request(method, path) for method in ("GET", "HEAD")]

    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.content))


async def test_one_working_engine_is_enough(gateway: Gateway) -> None:
    gateway.engine.statuses = [engine_status(last_step_age=999.0), engine_status()]

    assert (await gateway.http.get("/health/ready")).status_code == 200


async def test_one_model_can_be_asked_about(gateway: Gateway) -> None:
    found = await gateway.http.get("/health/ready", params={"model": "tiny"})
    unknown = await gateway.http.get("/health/ready", params={"model": "other"})

    assert (found.status_code, unknown.status_code) == (200, 404)


async def test_one_model_with_an_engine_is_enough(checkpoint: Path) -> None:
    async with serve(checkpoint, extra_models={"other": str(checkpoint)}) as gateway:
        one = await gateway.http.get("/health/ready")
        gateway.engine.statuses = []
        gateway.forget_engines()
        none = await gateway.http.get("/health/ready")

    assert one.status_code == 200
    message = none.json()["error"]["message"]
    assert message == "Not ready: no engine serves tiny; no engine serves other."


async def test_requests_are_taken_while_no_engine_runs(gateway: Gateway) -> None:
    gateway.engine.statuses = []

    assert (await gateway.complete()).status_code == 200


async def test_the_version_is_returned(gateway: Gateway) -> None:
    assert (await gateway.http.get("/version")).json()["version"]


async def test_models_tell_the_length_that_every_engine_can_run(gateway: Gateway) -> None:
    gateway.engine.statuses = [engine_status(max_model_len=300), engine_status(max_model_len=200)]

    answer = (await gateway.http.get("/v1/models")).json()

    assert answer["data"][0]["max_model_len"] == 200


async def test_models_are_listed_without_the_queue(gateway: Gateway) -> None:
    gateway.engine.unreachable = BackendUnavailable("gone")

    answer = (await gateway.http.get("/v1/models")).json()

    assert answer["data"][0]["max_model_len"] == 4096


async def test_the_api_is_documented(gateway: Gateway) -> None:
    document = (await gateway.http.get("/openapi.json")).json()

    schemas = document["components"]["schemas"]
    assert {"ChatRequest", "CompletionRequest", "Message", "TextPart"} <= schemas.keys()
    assert "/v1/chat/completions" in document["paths"]


async def test_a_clock_that_differs_from_redis_is_a_warning(checkpoint: Path) -> None:
    clock = RedisClock()

    async def an_hour_later() -> tuple[int, int]:
        return int(time.time()) + 3600, 0

    await clock.measure(an_hour_later)
    async with serve(checkpoint, clock=clock) as gateway:
        answer = await gateway.http.get("/health/ready")
        completion = await gateway.http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": "Hello"},
            headers={"x-request-deadline": f"{clock.now() + 60:.3f}"},
        )

    assert answer.json()["status"] == "ok"
    assert "s behind Redis'" in answer.json()["warning"]
    assert completion.status_code == 200
    (request,) = gateway.engine.submitted
    assert request.deadline_ms / 1000 == pytest.approx(clock.now() + 60, abs=60)
