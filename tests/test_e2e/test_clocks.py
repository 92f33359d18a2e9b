"""Gateways and engines on machines whose clocks are 25 h off serve every request, and report the
offset."""

import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from headrace_testing.batches import jsonl, line
from headrace_testing.faked_clock import faked_clock
from headrace_testing.processes import HeadraceProcess, until
from headrace_testing.stack import MODEL, EngineProcess, GatewayProcess, Stack

OFF_S = 25 * 3600
BEHIND, AHEAD = -OFF_S, OFF_S
# More than a test takes, and less than the clocks are off.
SOON_S = 3600
Sides = dict[int, tuple[GatewayProcess, EngineProcess]]


@pytest.fixture(scope="module")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    clocks = [faked_clock(seconds) for seconds in (BEHIND, AHEAD)]
    stack = Stack(checkpoint, tmp_path_factory.mktemp("clocks"))
    try:
        for clock in clocks:
            stack.add_gateway(env=clock)
            stack.add_engine("--policy", "deadline", env=clock)
        stack.await_engines(2)
        yield stack
    finally:
        stack.close()


@pytest.fixture
def sides(stack: Stack) -> Sides:
    """A gateway and an engine for each offset of their clocks."""
    pairs = zip(stack.gateways, stack.engines, strict=True)
    return dict(zip((BEHIND, AHEAD), pairs, strict=True))


@pytest.fixture(params=[BEHIND, AHEAD], ids=["behind", "ahead"])
def api(request: pytest.FixtureRequest, sides: Sides) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=sides[request.param][0].url, timeout=60) as client:
        yield client


def body(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, **fields}


@pytest.mark.parametrize(
    "header",
    [
        lambda: {},
        lambda: {"x-request-timeout": "50"},
        lambda: {"x-request-deadline": str(time.time() + 50)},
    ],
    ids=["default", "timeout", "deadline"],
)
def test_requests_are_answered_within_their_time(
    api: httpx.Client, header: Callable[[], dict[str, str]]
) -> None:
    answer = api.post("/v1/completions", json=body(), headers=header())
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert abs(answer.json()["created"] - time.time()) < SOON_S

    streamed = api.post("/v1/completions", json=body(stream=True), headers=header())
    assert streamed.text.endswith("data: [DONE]\n\n"), streamed.text


@pytest.mark.parametrize(
    "header",
    [
        lambda: {"x-request-timeout": "0.001"},
        lambda: {"x-request-deadline": str(time.time() - 1)},
    ],
    ids=["timeout", "deadline"],
)
def test_an_expired_timeout_ends_a_request(
    api: httpx.Client, header: Callable[[], dict[str, str]]
) -> None:
    answer = api.post("/v1/completions", json=body(max_tokens=500), headers=header())
    assert answer.status_code == 504, answer.text
    assert answer.json()["error"]["code"] == "deadline_exceeded"


def test_a_background_request_is_found_at_the_gateway_with_the_other_clock(
    api: httpx.Client, sides: Sides
) -> None:
    begun = api.post("/v1/completions", json=body(background=True))
    assert begun.status_code == 202, begun.text
    for gateway, _ in sides.values():
        url = gateway.url + begun.headers["location"]
        until(lambda url=url: httpx.get(url).json()["status"] == "completed", "its answer")  # type: ignore[misc]


def test_a_key_has_the_same_answer_at_both_gateways(api: httpx.Client, sides: Sides) -> None:
    headers = {"Idempotency-Key": f"clock {api.base_url}"}
    answers = [
        httpx.post(f"{gateway.url}/v1/completions", json=body(), headers=headers, timeout=60)
        for gateway, _ in (*sides.values(), *sides.values())
    ]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1


def test_a_batch_runs_to_its_end(api: httpx.Client) -> None:
    files = {"file": ("in.jsonl", jsonl([line(f"r{n}", model=MODEL) for n in range(3)]))}
    file = api.post("/v1/files", files=files, data={"purpose": "batch"}).json()
    assert abs(file["created_at"] - time.time()) < SOON_S
    batch_request = {
        "input_file_id": file["id"],
        "endpoint": "/v1/completions",
        "completion_window": "10m",
    }
    batch = api.post("/v1/batches", json=batch_request).json()

    def ended() -> bool:
        found = api.get(f"/v1/batches/{batch['id']}").json()
        assert found["status"] not in ("failed", "expired", "cancelled"), found
        return bool(found["status"] == "completed")

    until(ended, "the batch to complete")
    found = api.get(f"/v1/batches/{batch['id']}").json()
    assert found["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert api.get(f"/v1/files/{found['output_file_id']}/content").status_code == 200


def test_both_engines_work_and_know_how_long_requests_waited(sides: Sides) -> None:
    (gateway, first), (_, second) = sides[BEHIND], sides[AHEAD]
    made = "headrace_engine_tokens_total"

    def both_worked() -> bool:
        for number in range(8):
            answer = httpx.post(f"{gateway.url}/v1/completions", json=body(prompt=[9, number]))
            assert answer.status_code == 200, answer.text
        return all(engine.metric(made, 'type="output"') > 0 for engine in (first, second))

    until(both_worked, "both engines to have made tokens")
    for engine in (first, second):
        waited = "headrace_engine_request_phase_duration_seconds_sum"
        assert 0 <= engine.metric(waited, 'phase="queue"') < SOON_S


def test_each_process_reports_the_offset(sides: Sides) -> None:
    for ahead, processes in sides.items():
        for process in processes:
            assert isinstance(process, HeadraceProcess)
            process.await_log("clocks differ from redis")
            with urllib.request.urlopen(
                f"http://127.0.0.1:{process.metrics_port}/health/ready"
            ) as answer:
                shown = answer.read().decode()
            relation = "behind" if ahead < 0 else "ahead of"
            assert shown.startswith("ok\nwarning: this machine's clock is 90")
            assert f"s {relation} Redis'" in shown
    for ahead, (gateway, engine) in sides.items():
        assert abs(engine.metric("headrace_redis_clock_offset_seconds") + ahead) < 60
        warning = httpx.get(f"{gateway.url}/health/ready").json()["warning"]
        assert "Redis' clock" in warning
