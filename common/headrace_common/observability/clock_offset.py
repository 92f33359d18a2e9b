"""Exports the offset between the clocks of this machine and of Redis."""

from opentelemetry.metrics import Observation

from ..protocol.redis.clock import RedisClock
from . import metric_names as names
from .instruments import observed_gauge
from .telemetry import Telemetry


def show_clock_offset(telemetry: Telemetry, clock: RedisClock) -> None:
    """Exports the offset as a metric; if it is large, readiness shows a notice. Call it once."""
    observed_gauge(
        telemetry.meter,
        names.REDIS_CLOCK_OFFSET,
        lambda: [Observation(clock.offset)] if clock.measured else [],
    )
    telemetry.set_notice(clock.notice)
