"""A person watches the console of `headrace up` while 16 streams run, and kills an engine."""

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import httpx
import pytest

from headrace_testing.headrace_up import MODEL, UpProcess
from headrace_testing.processes import until

STREAMS, PROMPT, OUTPUT = 16, 200, 150
ORDER = ("waiting", "prefill", "decode")


class Console:
    """Reads the live data until it is closed."""

    def __init__(self, up: UpProcess) -> None:
        self.snapshots: list[dict[str, Any]] = []
        self._client = httpx.Client(base_url=up.url, timeout=60)
        self._ended = False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self._client.stream("GET", "/console/live") as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.snapshots.append(json.loads(line[6:]))
                if self._ended:
                    return

    @property
    def engines(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.snapshots[-1]["engines"] if self.snapshots else []
        return found

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        self._client.close()


@pytest.fixture(scope="module")
def up(paced_up: UpProcess) -> UpProcess:
    return paced_up


@pytest.fixture
def console(up: UpProcess) -> Iterator[Console]:
    console = Console(up)
    yield console
    console.close()


def stream(up: UpProcess, number: int, salt: str, output: int = OUTPUT) -> str:
    """The text of one greedy stream. With another salt its prompt is computed again."""
    body = {
        "model": MODEL,
        "prompt": [5 + (number * 7 + place) % 400 for place in range(PROMPT)],
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "cache_salt": salt,
    }
    text = ""
    with httpx.stream("POST", f"{up.url}/v1/completions", json=body, timeout=600) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


def phases(console: Console) -> dict[tuple[str, str], list[tuple[str, int]]]:
    """The phases and computed tokens that each engine reported of each request, in order."""
    found = defaultdict(list)
    for snapshot in console.snapshots:
        for engine in snapshot["engines"]:
            for one in engine.get("sequences", ()):
                found[one["request"], engine["id"]].append((one["state"], one["computed"]))
    return found


def busiest(console: Console) -> dict[str, Any]:
    return max(console.engines, key=lambda engine: len(engine.get("sequences", ())))


def test_the_console_shows_each_request_and_a_killed_engine_loses_no_stream(
    up: UpProcess, console: Console
) -> None:
    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(stream, up, number, "watched") for number in range(STREAMS)]

        def all_decode() -> bool:
            sequences = [one for engine in console.engines for one in engine.get("sequences", ())]
            return len(sequences) == STREAMS and all(one["output"] > 0 for one in sequences)

        until(all_decode, "all streams to have output")
        killed = busiest(console)
        answer = httpx.post(
            f"{up.url}/console/engines/{killed['id']}/kill", headers={"x-headrace-console": "1"}
        )
        assert (answer.status_code, answer.json()) == (202, {"killed": killed["name"]})
        until(lambda: killed["name"] in silent(console), "the engine to be silent")
        watched = [each.result() for each in running]

    until(lambda: restarted(console, killed), "the engine to be started again")
    assert f"killing {killed['name']}: the console asked for it" in up.printed
    check_phases(console)
    check_timelines(up, killed)
    with ThreadPoolExecutor(STREAMS) as pool:
        undisturbed = list(pool.map(lambda number: stream(up, number, "again"), range(STREAMS)))
    assert watched == undisturbed


def test_the_console_shows_prompts_that_are_partly_computed(
    up: UpProcess, console: Console
) -> None:
    """Snapshots are rare and prompts are computed fast, so prompts are sent until one was seen."""
    salts = map(str, count())

    def partly_computed() -> bool:
        salt = next(salts)
        list(pool.map(lambda number: stream(up, number, salt, output=1), range(STREAMS)))
        steps = [step for steps in phases(console).values() for step in steps]
        return any(state == "prefill" and 0 < tokens < PROMPT for state, tokens in steps)

    with ThreadPoolExecutor(STREAMS) as pool:
        until(partly_computed, "a partly computed prompt")


def silent(console: Console) -> list[str]:
    return [engine["name"] for engine in console.engines if engine["state"] == "silent"]


def restarted(console: Console, killed: dict[str, Any]) -> bool:
    return any(
        engine["name"] == killed["name"]
        and engine["id"] != killed["id"]
        and engine["state"] == "ready"
        and engine["detail"]
        for engine in console.engines
    )


def check_phases(console: Console) -> None:
    seen = phases(console)
    requests = {request for request, _ in seen}
    assert len(requests) == STREAMS
    for steps in seen.values():
        places = [ORDER.index(state) for state, _ in steps]
        assert places == sorted(places), "a sequence goes one way"
        computed = [tokens for _, tokens in steps]
        assert computed == sorted(computed)
    for request in requests:
        states = {
            state for (name, _), steps in seen.items() if name == request for state, _ in steps
        }
        assert "decode" in states


def check_timelines(up: UpProcess, killed: dict[str, Any]) -> None:
    found = httpx.get(f"{up.url}/console/requests").json()["requests"]
    assert len(found) == STREAMS
    for request in found:
        whats = [event["what"] for event in request["events"]]
        moved = killed["id"] == request["engines"][0]
        assert whats == ["accepted", "started", "first_token", *["moved"] * moved, "ended"]
        assert (request["state"], request["finish_reason"]) == ("finished", "length")
        assert (request["path"], request["output_tokens"]) == ("/v1/completions", OUTPUT)
        times = request["times"]
        assert times["accepted"] <= times["started"] <= times["first_token"] <= times["ended"]
    assert any(killed["id"] == request["engines"][0] for request in found)
