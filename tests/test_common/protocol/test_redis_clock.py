"""The offset between a process's clock and Redis' clock: measured, kept and reported."""

import time
from collections.abc import Awaitable, Callable
from urllib.request import urlopen

import pytest

from headrace_common.observability import metric_names as names
from headrace_common.observability.clock_offset import show_clock_offset
from headrace_common.observability.telemetry import setup
from headrace_common.protocol.redis.clock import WARN_OFFSET_S, RedisClock
from headrace_testing.backends import OverRedis
from headrace_testing.telemetry import scrape, value
from headrace_testing.valkey import ValkeyServer

DAY = 86_400.0
DIFFER, AGREE = "clocks differ from redis", "clocks agree with redis again"


class Machine:
    """The clocks of a machine and of Redis, and the network between them. Times in seconds."""

    def __init__(self) -> None:
        self.wall, self.monotonic, self.redis = 1_000_000.0, 500.0, 1_000_000.0
        self.clock = RedisClock(lambda: self.wall, lambda: self.monotonic)

    def sleep(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds
        self.redis += seconds

    def ask(self, there: float, back: float) -> Callable[[], Awaitable[tuple[int, int]]]:
        async def time_command() -> tuple[int, int]:
            self.sleep(there)
            reading = self.redis
            self.sleep(back)
            return int(reading), int(reading % 1 * 1e6)

        return time_command

    async def measure(self, there: float = 0.001, back: float = 0.001) -> None:
        await self.clock.measure(self.ask(there, back))

    @property
    def error(self) -> float:
        return abs(self.clock.now() - self.redis)


@pytest.fixture
def machine() -> Machine:
    return Machine()


def text_of(url: str) -> str:
    with urlopen(url) as answer:
        text: bytes = answer.read()
        return text.decode()


def test_before_the_first_measurement_the_machines_clock_is_used(machine: Machine) -> None:
    machine.redis += DAY
    assert (machine.clock.now(), machine.clock.measured) == (machine.wall, False)


@pytest.mark.parametrize("offset", [-25 * 3600.0, 0.0, 700.0])
async def test_the_offset_is_known_to_half_a_round_trip(machine: Machine, offset: float) -> None:
    machine.redis += offset
    await machine.measure(there=0.02, back=0.0)
    assert machine.error <= 0.0101
    assert machine.clock.offset == pytest.approx(offset, abs=0.0101)
    assert machine.clock.now_ms() == pytest.approx(machine.redis * 1000, abs=11)


async def test_a_slow_round_trip_does_not_replace_a_better_measurement(machine: Machine) -> None:
    await machine.measure()
    await machine.measure(there=3.0, back=0.0)
    assert machine.error <= 0.002


async def test_an_old_measurement_is_replaced_by_a_worse_new_one(machine: Machine) -> None:
    await machine.measure(there=0.004, back=0.0)
    machine.sleep(3600)
    machine.redis += 0.003  # the two clocks have drifted apart
    await machine.measure(there=0.01, back=0.01)
    assert machine.error <= 0.0001


async def test_a_step_of_the_machines_clock_changes_nothing(machine: Machine) -> None:
    await machine.measure()
    machine.wall += DAY
    assert machine.error <= 0.002
    assert machine.clock.offset == pytest.approx(-DAY, abs=0.01)


async def test_another_master_with_another_clock_is_believed_at_once(machine: Machine) -> None:
    await machine.measure()
    machine.redis += 30.0
    await machine.measure(there=0.2, back=0.2)
    assert machine.error <= 0.201


async def test_a_large_offset_and_its_end_are_each_logged_once(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace_common.protocol.redis.clock")
    await machine.measure()
    assert machine.clock.notice() is None
    machine.redis += 2 * WARN_OFFSET_S
    for _ in range(3):
        await machine.measure()
    assert "10.0 s behind Redis'" in (machine.clock.notice() or "")
    machine.wall += 4 * WARN_OFFSET_S
    await machine.measure()
    assert "10.0 s ahead of Redis'" in (machine.clock.notice() or "")
    machine.wall -= 2 * WARN_OFFSET_S
    for _ in range(3):
        await machine.measure()
    assert caplog.messages == [DIFFER, AGREE]


async def test_the_offset_is_a_metric_and_part_of_the_readiness_answer(machine: Machine) -> None:
    telemetry = setup("test", metrics_port=0)
    assert telemetry.server is not None
    url, name = telemetry.server.url, names.REDIS_CLOCK_OFFSET.prometheus_name
    try:
        show_clock_offset(telemetry, machine.clock)
        assert name not in scrape(url), "nothing is known yet"
        assert text_of(f"{url}/health/ready") == "ok\n"
        machine.redis += DAY
        await machine.measure()
        assert value(scrape(url), name) == pytest.approx(DAY, abs=0.01)
        assert text_of(f"{url}/health/ready").startswith(
            "ok\nwarning: this machine's clock is 86400"
        )
        assert text_of(f"{url}/health/live") == "ok\n"
    finally:
        telemetry.shutdown()


@pytest.mark.parametrize("ahead", [-25 * 3600.0, 25 * 3600.0])
async def test_a_started_gateway_and_engine_know_the_offset(
    valkey_server: ValkeyServer, ahead: float
) -> None:
    redis_backend = OverRedis(valkey_server.url)
    connection = redis_backend.connect()
    connection.clock = RedisClock(lambda: time.time() + ahead)
    try:
        await connection.measure_clock("any")
        assert connection.clock.now() == pytest.approx(time.time(), abs=60)
        assert connection.clock.offset == pytest.approx(-ahead, abs=60)
    finally:
        await redis_backend.close()
