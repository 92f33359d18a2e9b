"""Checks of grammars: costly checks are stopped and remembered, and other tenants do not wait for
them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest

from headrace_common.pools.limited_pool import KillReason, TaskLimits
from headrace_common.structured.grammar_checks import (
    CheckBounds,
    CheckResult,
    GrammarChecks,
    GrammarsBusy,
)
from headrace_common.structured.refused_grammars import TTL_S, LocalRefusedGrammars, RefusedGrammar
from headrace_common.structured.structured import StructuredOutputError, StructuredOutputsParams
from headrace_testing.pool_tasks import MIB, costly_schema

GOOD = StructuredOutputsParams(regex="a+")
COSTLY = StructuredOutputsParams(json=costly_schema())
UNLIMITED = TaskLimits(timeout=200, cpu_seconds=200, memory_bytes=2**40)

Make = Callable[..., GrammarChecks]


class Counted(Counter[CheckResult]):
    def add(self, result: CheckResult) -> None:
        self[result] += 1


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture
def refused() -> LocalRefusedGrammars:
    return LocalRefusedGrammars()


@pytest.fixture
async def make(counted: Counted, refused: LocalRefusedGrammars) -> AsyncIterator[Make]:
    made: list[GrammarChecks] = []

    def make(limits: TaskLimits, **bounds: int) -> GrammarChecks:
        bounds_of_all = CheckBounds(limits=limits, max_wait=None, **bounds)
        made.append(GrammarChecks(bounds_of_all, refused, counted.add))
        return made[-1]

    yield make
    for checks in made:
        await checks.close()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (TaskLimits(timeout=200, memory_bytes=32 * MIB), "takes over 32 MiB to compile"),
        (
            TaskLimits(timeout=200, cpu_seconds=1, memory_bytes=2**40),
            "takes over 1 s of CPU time to compile",
        ),
    ],
)
async def test_a_costly_schema_is_refused_with_what_to_change_and_not_tried_again(
    make: Make, counted: Counted, limits: TaskLimits, message: str
) -> None:
    checks = make(limits)
    for tenant in ("a", "b"):
        with pytest.raises(StructuredOutputError, match=message) as caught:
            await checks.check(COSTLY, tenant)
        assert caught.value.field == "json"
        assert caught.value.message.endswith(": have less of allOf, anyOf, pattern")

    assert counted == {CheckResult.TOO_EXPENSIVE: 1, CheckResult.REMEMBERED: 1}


async def test_a_tenant_waits_for_its_own_costly_schemas_only(make: Make) -> None:
    checks = make(UNLIMITED, workers=2)
    costly = [
        asyncio.create_task(checks.check(StructuredOutputsParams(json=costly_schema(n)), "a"))
        for n in (40, 41, 42)
    ]
    await checks.check(GOOD, "b")
    await checks.check(StructuredOutputsParams(regex="b+"), "b")

    assert not any(task.done() for task in costly)
    for task in costly:
        task.cancel()
    await checks.check(StructuredOutputsParams(regex="c+"), "a")  # their processes are free again


async def test_equal_grammars_in_flight_are_checked_once(make: Make, counted: Counted) -> None:
    checks = make(UNLIMITED)
    await asyncio.gather(*(checks.check(GOOD, "a") for _ in range(8)))
    await checks.check(GOOD, "b")

    assert counted == {CheckResult.GOOD: 1}


async def test_a_check_continues_while_one_client_waits_for_it(
    make: Make, counted: Counted
) -> None:
    checks = make(UNLIMITED)
    gone, left = (asyncio.create_task(checks.check(GOOD, "a")) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    await left

    assert counted == {CheckResult.GOOD: 1}


async def test_a_check_does_not_join_one_that_was_just_cancelled(make: Make) -> None:
    checks = make(UNLIMITED)
    leaving = asyncio.create_task(checks.check(GOOD, "a"))
    for _ in range(10):
        await asyncio.sleep(0)  # until the check runs
    leaving.cancel()
    await asyncio.sleep(0)
    await checks.check(GOOD, "a")
    assert checks.known(GOOD)


async def test_a_grammar_that_cannot_be_compiled_is_refused_with_the_compilers_reason(
    make: Make, counted: Counted
) -> None:
    with pytest.raises(StructuredOutputError, match="unclosed group") as caught:
        await make(UNLIMITED).check(StructuredOutputsParams(regex="(a"), "a")

    assert caught.value.field == "regex"
    assert counted == {CheckResult.INVALID: 1}


async def test_a_single_timeout_does_not_block_a_grammar(make: Make, counted: Counted) -> None:
    """The machine may be the cause: the client may try again, but only a few times."""
    checks = make(TaskLimits(timeout=0.3, cpu_seconds=200, memory_bytes=2**40))
    for _ in range(2):
        with pytest.raises(GrammarsBusy, match=r"took over 0\.3 s"):
            await checks.check(COSTLY, "a")
    for _ in range(2):
        with pytest.raises(StructuredOutputError, match=r"takes over 0\.3 s to compile"):
            await checks.check(COSTLY, "a")

    assert counted == {
        CheckResult.BUSY: 2,
        CheckResult.TOO_EXPENSIVE: 1,
        CheckResult.REMEMBERED: 1,
    }


async def test_the_number_of_waiting_checks_is_limited(make: Make, counted: Counted) -> None:
    checks = make(UNLIMITED, workers=1, most_waiting_of_tenant=1)
    costly = [
        asyncio.create_task(checks.check(StructuredOutputsParams(json=costly_schema(n)), "a"))
        for n in (40, 41)
    ]
    await asyncio.sleep(0.1)
    with pytest.raises(GrammarsBusy, match="too many of your") as caught:
        await checks.check(GOOD, "a")

    assert caught.value.tenant
    for task in costly:
        task.cancel()


async def test_refused_grammars_are_forgotten_after_a_time() -> None:
    now = [0.0]
    local = LocalRefusedGrammars(lambda: now[0])
    await local.add("x", RefusedGrammar(KillReason.CPU, 1))

    assert await local.find("x") == RefusedGrammar(KillReason.CPU, 1)
    now[0] = TTL_S
    assert await local.find("x") is None
