"""What an attempt uses: its seconds in the engine's core, and its KV over these seconds."""

from headrace_common.protocol.ledger import AttemptUsage
from headrace_engine.serving.usage_meter import UsageMeter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def meter() -> tuple[UsageMeter, Clock]:
    clock = Clock()
    return UsageMeter(10.0, clock), clock


def test_kv_grows_evenly_between_two_readings() -> None:
    usage, clock = meter()
    usage.start(100)
    clock.now += 2.0
    assert usage.read(120, 7) == AttemptUsage(2000, 2 * 110 * 10, 7)
    clock.now += 0.5
    assert usage.read(120, 7) == AttemptUsage(2500, 2 * 110 * 10 + 600, 7)


def test_time_outside_of_the_core_does_not_count() -> None:
    usage, clock = meter()
    clock.now += 5.0
    assert usage.read(3, 0) == AttemptUsage()
    usage.start(3)
    clock.now += 1.0
    usage.stop(3)
    clock.now += 5.0
    assert usage.read(4, 0) == AttemptUsage(1000, 30)
    usage.start(4)
    clock.now += 1.0
    assert usage.read(4, 0) == AttemptUsage(2000, 70)
