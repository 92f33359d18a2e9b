"""While memory is short, no more work is taken, and this is logged once."""

import logging

import pytest

from headrace_engine.serving.memory_guard import CHECK_INTERVAL_S, MemoryGuard


class Machine:
    def __init__(self) -> None:
        self.free, self.now, self.looks = 1000, 0.0, 0

    def available(self) -> int:
        self.looks += 1
        return self.free

    def after(self, guard: MemoryGuard, free: int) -> bool:
        """The guard's answer a while later, with this much memory left."""
        self.free, self.now = free, self.now + CHECK_INTERVAL_S
        return guard.short


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def guard(machine: Machine) -> MemoryGuard:
    return MemoryGuard(machine.available, min_free=100, clock=lambda: machine.now)


def test_memory_stays_short_until_clearly_more_is_free(
    machine: Machine, guard: MemoryGuard
) -> None:
    found = [machine.after(guard, free) for free in (500, 100, 99, 150, 199, 200, 150)]

    assert found == [False, False, True, True, True, False, False]


def test_each_change_is_reported_once(
    machine: Machine, guard: MemoryGuard, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for free in (50, 40, 30, 300, 400):
            machine.after(guard, free)

    assert [record.message for record in caplog.records] == [
        "memory is short, no more work is taken",
        "memory is free again",
    ]


def test_memory_is_checked_periodically_and_not_at_each_call(
    machine: Machine, guard: MemoryGuard
) -> None:
    for _ in range(50):
        assert guard.short is False

    assert machine.looks == 1
