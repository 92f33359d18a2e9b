"""Bad input is answered by 4xx in OpenAI's format, and costs the service nothing: afterwards the
same engine serves the next request, memory stays flat, and nothing is left in KV cache or queue.
This file tests bodies; test_hostile_clients tests hostile connections and bytes that others write
into Redis."""

import re
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import httpx
import psutil
import pytest

from headrace_testing.bad_bodies import BadBody, bad_bodies
from headrace_testing.single import SingleStack

MIB = 2**20
BODIES = bad_bodies()


@pytest.fixture(autouse=True)
def _survives(single: SingleStack) -> Iterator[None]:
    """Checks that the next request is served by the same processes."""
    yield
    assert single.engine.alive and single.gateway.alive
    answer = single.complete()
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4


@pytest.fixture(autouse=True, scope="module")
def _costs_nothing(single: SingleStack) -> Iterator[None]:
    """Checks for the whole file: no memory beyond that of one large body, and no KV block, is
    left."""
    single.complete()
    before = rss(single)
    yield
    single.until_clean()
    assert all(now - then < 192 * MIB for now, then in zip(rss(single), before, strict=True))


def rss(single: SingleStack) -> list[int]:
    """The resident memory of the engine and the gateway in bytes."""
    return [
        psutil.Process(process.pid).memory_info().rss for process in (single.engine, single.gateway)
    ]


def settles(single: SingleStack, action: Callable[[], None]) -> bool:
    """Whether memory stops growing while an action is repeated; an allocator needs some rounds."""
    before = rss(single)
    for _ in range(10):
        action()
        after = rss(single)
        if all(now - then < 4 * MIB for now, then in zip(after, before, strict=True)):
            return True
        before = after
    return False


def refused(answer: httpx.Response) -> dict[str, object]:
    """The error object of a 4xx answer."""
    assert 400 <= answer.status_code < 500, f"{answer.status_code} {answer.text[:500]}"
    error: dict[str, object] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and len(answer.content) < 1000
    return error


@pytest.mark.parametrize("body", BODIES, ids=[body.name for body in BODIES])
def test_bad_input_is_refused(single: SingleStack, body: BadBody) -> None:
    answer = single.post(body.path, body.content, dict(body.headers))

    error = refused(answer)
    assert body.status in (None, answer.status_code)
    if body.param is not None:
        assert re.match(rf"{re.escape(body.param)}($|[.[])", str(error["param"]))
        too_long = error["code"] == "context_length_exceeded"
        assert too_long or re.split(r"[.[]", body.param)[0] in str(error["message"])


@pytest.mark.parametrize(
    "constraint",
    [
        {"guided_regex": "(a+)+b"},
        {"guided_regex": "(a|aa)+$"},
        {"guided_json": {"$ref": "#"}},
        {"guided_json": {"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}},
    ],
    ids=["nested repetition", "overlapping repetition", "loop", "recursion"],
)
def test_constraints_that_are_costly_in_other_servers_are_cheap(
    single: SingleStack, constraint: dict[str, Any]
) -> None:
    """Such requests are either refused or run like others."""
    answer = single.complete(**constraint)
    assert answer.status_code == 200 or refused(answer)


def test_very_many_constraints_take_no_more_memory(single: SingleStack) -> None:
    def constraints(start: int) -> None:
        for number in range(start, start + 60):
            answer = single.complete(max_tokens=1, guided_regex=f"{number}[a-z]{{1,20}}x+")
            assert answer.status_code == 200, answer.text

    numbers = count(step=60)
    assert settles(single, lambda: constraints(next(numbers)))


def test_a_body_in_very_many_chunks(single: SingleStack) -> None:
    lines = (b" " for _ in range(100_000))
    request = httpx.Request(
        "POST",
        f"{single.gateway.url}/v1/completions",
        content=lines,
        headers={"content-type": "application/json"},
    )
    with httpx.Client(timeout=60) as client:
        refused(client.send(request))


def test_repeated_bad_input_takes_no_more_memory(single: SingleStack) -> None:
    def everything() -> None:
        for body in BODIES:
            refused(single.post(body.path, body.content, dict(body.headers)))

    assert settles(single, everything)
