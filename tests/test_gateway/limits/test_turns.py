"""Requests of one tenant begin in turn, a few in each turn of the event loop."""

import asyncio

import pytest

from headrace_gateway.limits.turns import RequestTurns

REQUESTS = 20


@pytest.fixture(params=[1, 2])
def turns(request: pytest.FixtureRequest) -> RequestTurns:
    """Turns while another tenant, `z`, has an open request."""
    turns = RequestTurns(request.param)
    turns.open("z")
    return turns


async def begin(turns: RequestTurns, tenant: str, name: str, begun: list[str]) -> None:
    turns.open(tenant)
    if not turns.begin(tenant):
        await turns.wait(tenant)
    begun.append(name)
    turns.close(tenant)


async def turn() -> None:
    await asyncio.sleep(0)


async def begin_all(turns: RequestTurns, tenant: str, begun: list[str]) -> list[asyncio.Task[None]]:
    names = [f"{tenant}{number}" for number in range(REQUESTS)]
    tasks = [asyncio.create_task(begin(turns, tenant, name, begun)) for name in names]
    await turn()
    return tasks


async def test_requests_one_after_the_other_do_not_wait(turns: RequestTurns) -> None:
    turns.open("a")
    for _ in range(3):
        assert turns.begin("a")
        await turn()


async def test_a_tenant_that_is_alone_begins_all_of_its_requests_at_once() -> None:
    turns, begun = RequestTurns(most=1), list[str]()

    await begin_all(turns, "a", begun)

    assert len(begun) == REQUESTS


async def test_requests_of_a_tenant_begin_in_their_order_over_several_turns() -> None:
    turns, begun = RequestTurns(most=2), list[str]()
    turns.open("z")
    tasks = await begin_all(turns, "a", begun)

    most, before = 0, 0
    while not all(task.done() for task in tasks):
        most, before = max(most, len(begun) - before), len(begun)
        await turn()

    assert begun == [f"a{number}" for number in range(REQUESTS)]
    assert most == 2


async def test_a_tenant_does_not_wait_for_the_line_of_another(turns: RequestTurns) -> None:
    begun = list[str]()
    tasks = await begin_all(turns, "a", begun)

    assert turns.begin("b")
    assert len(begun) < REQUESTS
    await asyncio.gather(*tasks)


async def test_a_cancelled_request_takes_no_turn() -> None:
    turns, begun = RequestTurns(most=1), list[str]()
    turns.open("z")
    tasks = await begin_all(turns, "a", begun)
    for task in tasks[1:-1]:
        task.cancel()

    await asyncio.wait(tasks)

    assert begun == ["a0", f"a{REQUESTS - 1}"]
    await turn()
    await turn()
    assert turns.begin("a"), "the line is empty again"
