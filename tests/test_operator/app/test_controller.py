"""When the controller reconciles, by a clock that jumps to the next timer."""

import asyncio
import selectors
from typing import Any

import pytest

from headrace_operator.app.controller import Controller

KEY = ("default", "qwen")


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: its clock jumps to the next timer."""

    def __init__(self) -> None:
        loop = self
        self.now = 0.0

        class Selector(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> list[Any]:
                loop.now += timeout or 0.0
                return super().select(0)

        super().__init__(Selector())

    def time(self) -> float:
        return self.now


def starts(
    took: float, seconds: float, *, nudge_at: float | None = None, fails: bool = False
) -> list[int]:
    """The seconds at which a ModelService was reconciled, every 5 s with a gap of 1 s. One
    reconciliation takes `took` seconds."""
    loop = JumpingLoop()
    begun: list[int] = []

    async def reconcile(_key: tuple[str, str]) -> None:
        begun.append(round(loop.time()))
        await asyncio.sleep(took)
        if fails:
            raise TimeoutError

    async def watch() -> None:
        controller = Controller(reconcile, interval=5.0)
        controller.wake(KEY)
        if nudge_at is not None:
            loop.call_at(nudge_at, controller.nudge, KEY)
        await asyncio.sleep(seconds)
        await controller.close()

    try:
        loop.run_until_complete(watch())
    finally:
        loop.close()
    return begun


@pytest.mark.parametrize("took", [0.0, 2.0, 4.0])
def test_the_interval_is_from_start_to_start(took: float) -> None:
    assert starts(took, 16) == [0, 5, 10, 15]


def test_after_a_long_reconciliation_the_next_one_begins_after_the_gap() -> None:
    assert starts(6, 16) == [0, 7, 14]


def test_an_event_ends_the_pause() -> None:
    assert starts(1, 14, nudge_at=3) == [0, 3, 8, 13]


def test_after_failures_the_pauses_grow_from_the_end() -> None:
    assert starts(1, 20, fails=True) == [0, 3, 8, 17]
