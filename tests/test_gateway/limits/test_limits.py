"""The limits of a request: what JSON may contain, and that each field of each body has a bound."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from annotated_types import MaxLen
from hypothesis import given
from hypothesis import strategies as st
from pydantic import FailFast, StringConstraints
from pydantic.fields import FieldInfo

import headrace_gateway.http.app  # noqa: F401  knows the bodies of all routes
from headrace_gateway.errors import ApiError
from headrace_gateway.limits.bodies import BodyBuffers
from headrace_gateway.limits.budget import Budget
from headrace_gateway.limits.fields import BoundedBy
from headrace_gateway.limits.json_shape import PIECE_BYTES, check_members, check_shape
from headrace_gateway.limits.work import INLINE_SIZE, WorkPool, check_wanted, size_of
from headrace_gateway.schemas.chat_messages import Body
from headrace_testing.gateway import serve
from headrace_testing.waiting import eventually

# Short JSON is checked too.
SMALL = replace(Budget(), values=8, strings=8, containers=4, members=4, members_per_object=3)
LARGE = INLINE_SIZE + 1
CODE = "request_too_complex"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('["a", 1, 2, 3, 4, 5, 6, 7, 8, 9]', "values"),
        ('["a","b","c","d","e","f","g","h","i"]', "strings"),
        ("[[],[],{},{},1]", "objects and lists"),
        ('[{"a":1,"b":2},{"c":3,"d":4,"e":5}]', "members of objects"),
    ],
)
def test_json_over_the_budget_is_refused_with_the_exceeded_limit(text: str, what: str) -> None:
    with pytest.raises(ApiError, match=what) as refused:
        check_shape(text.encode(), SMALL)
    assert (refused.value.status, refused.value.code) == (400, CODE)


@pytest.mark.parametrize(
    "text",
    [
        r'{"a": "[[[[[[[[{{{{{{{{::::::::,,,,,,,,,,"}',
        r'{"a": "\"[[[[[[\\", "b": "\\\"{{{{{{{::::::"}',
        r'["\\", "\\\\", "\n\"\n,,,,,,,,,,,,,,,,"]',
        "[1, 2, 3, 4, 5, 6, 7, 8]",
    ],
)
def test_characters_within_strings_do_not_count(text: str) -> None:
    json.loads(text)
    check_shape(text.encode(), SMALL)


VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\,:[]{}\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='b"\\,'), inner),
)


@given(value=VALUES, ascii_only=st.booleans(), piece_bytes=st.integers(1, 64))
def test_json_is_refused_exactly_if_its_count_exceeds_the_limit(
    value: Any, ascii_only: bool, piece_bytes: int
) -> None:
    """Values are counted including the whole, and an empty list or object as if it had one
    value."""
    counts = dict.fromkeys(("values", "strings", "containers", "members"), 0)
    count(value, counts)
    over = any(number > getattr(SMALL, name) for name, number in counts.items())
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()

    assert refuses(raw, piece_bytes) == (over and len(raw) > SMALL.shortest_json_over_budget)


def count(value: Any, counts: dict[str, int]) -> None:
    counts["strings"] += isinstance(value, str)
    if not isinstance(value, list | dict):
        return
    counts["containers"] += 1
    counts["values"] += max(1, len(value))
    if isinstance(value, dict):
        counts["members"] += len(value)
        counts["strings"] += len(value)
    for item in value.values() if isinstance(value, dict) else value:
        count(item, counts)


def refuses(raw: bytes, piece_bytes: int) -> bool:
    try:
        check_shape(raw, SMALL, piece_bytes)
    except ApiError:
        return True
    return False


class ReadBytes(bytes):
    """Bytes that note the lengths of the pieces that are read of them."""

    def __new__(cls, content: bytes) -> "ReadBytes":
        made = super().__new__(cls, content)
        made.lengths = []
        return made

    lengths: list[int]

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.lengths.append(len(found))
        return found


@pytest.mark.parametrize("text", ["a" * 2**22, "\\" * 2**21], ids=["letters", "backslashes"])
def test_a_large_body_is_read_in_pieces_so_that_other_threads_can_run(text: str) -> None:
    raw = ReadBytes(json.dumps({"prompt": text}).encode())

    check_shape(raw, Budget())

    assert max(raw.lengths) <= PIECE_BYTES + 1
    assert sum(raw.lengths) >= len(raw)


def test_an_object_of_too_many_members_is_named() -> None:
    content = {"a": [1, 2], "b": {"c": [{"d": 1, "e": 2, "f": 3, "g": 4}]}}
    with pytest.raises(ApiError) as refused:
        check_members(content, json.dumps(content).encode(), SMALL)
    assert (refused.value.param, refused.value.code) == ("b", CODE)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": list(range(10**6))},
        {"input": ["some text"] * 2048},
        {"input": [[1] * 500] * 2048},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}] * 4096},
        {"prompt": "a,[{:" * 10**6},
    ],
    ids=["a million token ids", "2,048 inputs", "lists of ids", "4,096 messages", "long text"],
)
def test_typical_bodies_are_within_the_budget(body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    check_shape(raw, Budget())
    check_members(body, raw, Budget())


# Threads


def holds(condition: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def requesting() -> bool:
        return condition()

    return requesting


async def test_a_tenant_never_has_all_threads() -> None:
    """Not even if it sends many requests and disconnects often."""
    go = threading.Event()
    running: list[str] = []

    def wait(name: str) -> None:
        running.append(name)
        assert go.wait(60)

    with ThreadPoolExecutor(3) as executor:
        pool = WorkPool(executor, 3)
        hostile, other = pool.of("hostile"), pool.of("other")
        requesting = [
            asyncio.create_task(hostile.run(LARGE, partial(wait, f"hostile {number}")))
            for number in range(9)
        ]
        await eventually(holds(lambda: len(running) == 2))
        for task in requesting:
            task.cancel()  # its threads continue
        again = asyncio.create_task(hostile.run(LARGE, partial(wait, "again")))
        answer = await other.run(LARGE, lambda: "in time")
        held = list(running)
        go.set()
        await again

    assert answer == "in time"
    assert held == ["hostile 0", "hostile 1"]


async def test_work_whose_caller_was_cancelled_ends_at_its_next_check() -> None:
    begun = threading.Event()

    def endless() -> None:
        while True:
            begun.set()
            check_wanted()

    with ThreadPoolExecutor(1) as executor:
        pool = WorkPool(executor, 1)
        caller = asyncio.create_task(pool.of("a").run(LARGE, endless))
        await eventually(holds(begun.is_set))
        caller.cancel()
        await eventually(holds(lambda: pool.tenants == 0))
        answer = await pool.of("a").run(LARGE, lambda: "the thread is free")

    assert answer == "the thread is free"


async def test_tenants_without_work_are_forgotten() -> None:
    with ThreadPoolExecutor(2) as executor:
        pool = WorkPool(executor, 2)
        await asyncio.gather(*(pool.of(f"{n % 5}").run(LARGE, lambda: None) for n in range(50)))
        await eventually(holds(lambda: not pool.tenants))


async def test_small_work_is_done_at_once_and_a_fault_of_large_work_is_raised() -> None:
    def fail() -> None:
        raise ValueError(threading.current_thread().name)

    with ThreadPoolExecutor(2, "thread") as executor:
        work = WorkPool(executor, 2).of("")
        with pytest.raises(ValueError, match="MainThread"):
            await work.run(INLINE_SIZE, fail)
        with pytest.raises(ValueError, match="thread_"):
            await work.run(LARGE, fail)


@pytest.mark.parametrize("value", ["a" * 5000, ["a"] * 5000, {"a": [{"b": "c" * 5000}]}])
def test_the_size_of_data_is_that_of_its_texts_and_items(value: object) -> None:
    assert size_of(value) > INLINE_SIZE
    assert size_of({"a": ["b", "cd", None, 1]}) == 8


# Bodies in memory


def test_all_bodies_and_those_of_one_tenant_are_bounded() -> None:
    bodies = BodyBuffers(most=10, most_of_tenant=6)
    first, second, other = bodies.open("a"), bodies.open("a"), bodies.open("b")
    first.add(4)
    other.add(5)
    for held, size in ((second, 3), (second, 2), (other, 2)):
        with pytest.raises(ApiError) as refused:
            held.add(size)
        assert (refused.value.status, refused.value.code) == (503, "too_many_bodies")
    first.drop()
    first.drop()
    second.add(5)


async def test_half_sent_bodies_do_not_fill_the_memory(checkpoint: Path) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 8000000\r\n\r\n"
    )
    async with serve(checkpoint) as gateway, AsyncExitStack() as opened, asyncio.timeout(60):
        readers = []
        for _ in range(18):
            reader, writer = await opened.enter_async_context(gateway.connect())
            writer.write(head + b" " * 7_900_000)
            await writer.drain()
            readers.append(reader)
        refusal = await first_refusal(readers)

    assert refusal.startswith(b"HTTP/1.1 503 ") and b"too_many_bodies" in refusal


async def first_refusal(readers: Sequence[asyncio.StreamReader]) -> bytes:
    """The first answer on any of these connections."""
    tasks = [asyncio.create_task(reader.read(2000)) for reader in readers]
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    return next(iter(done)).result()


# Fields of bodies


def kinds(of: type[Body]) -> Iterator[type[Body]]:
    for kind in of.__subclasses__():
        yield kind
        yield from kinds(kind)


def unbounded(kind: Any, bounds: Sequence[Any], place: str) -> Iterator[str]:
    """The places in a type that no bound limits; `bounds` are those of the types around it."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from unbounded(inner[0], [*bounds, *flat(inner[1:])], place)
    elif origin in (Union, UnionType):
        for branch in inner:
            yield from unbounded(branch, bounds, place)
    elif origin in (list, dict):
        yield from unbounded_items(origin, inner, bounds, place)
    elif kind is str:
        if not has(bounds, MaxLen, BoundedBy):
            yield f"{place}: a text is a Name or a Text, or needs max_length"
    elif origin is not Literal and not (isinstance(kind, type) and issubclass(kind, Body)):
        assert kind in (Any, NoneType, bool, int, float), f"{place}: what bounds {kind}?"


def unbounded_items(
    origin: type, inner: Sequence[Any], bounds: Sequence[Any], place: str
) -> Iterator[str]:
    item = inner[-1]
    if not has(bounds, MaxLen):
        yield f"{place}: needs max_length"
    if origin is list and item is not Any and not has(bounds, FailFast):
        yield f"{place}: a list is Items"
    yield from unbounded(item, (), f"{place}[]")


def flat(metadata: Sequence[Any]) -> Iterator[Any]:
    for each in metadata:
        yield each
        if isinstance(each, FieldInfo):
            yield from flat(each.metadata)
        if isinstance(each, StringConstraints) and each.max_length is not None:
            yield MaxLen(each.max_length)


def has(bounds: Sequence[Any], *wanted: type) -> bool:
    return any(isinstance(bound, wanted) for bound in bounds)


def test_every_field_of_every_body_has_a_bound() -> None:
    found = [
        fault
        for kind in set(kinds(Body))
        for name, field in kind.model_fields.items()
        for fault in unbounded(
            field.annotation, list(flat(field.metadata)), f"{kind.__name__}.{name}"
        )
    ]

    assert found == []


def test_the_search_for_bounds_finds_unbounded_fields() -> None:
    places = [
        place
        for kind in (list[str], dict[str, int], str | None, Annotated[list[int], MaxLen(3)])
        for place in unbounded(kind, (), "x")
    ]
    assert len(places) == 6
