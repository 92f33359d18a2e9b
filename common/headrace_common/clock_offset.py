"""Shows operators how far the clocks of this machine and of Redis are apart."""

from opentelemetry.metrics import Observation

from . import metric_names as names
from .instruments import observed_gauge
from .protocol.redis_clock import RedisClock
from .telemetry import Telemetry


def show_clock_offset(telemetry: Telemetry, clock: RedisClock) -> None:
    """Exports the offset as a metric, and tells it with readiness if it is large. Call once."""
    observed_gauge(
        telemetry.meter,
        names.REDIS_CLOCK_OFFSET,
        lambda: [Observation(clock.offset)] if clock.measured else [],
    )
    telemetry.set_notice(clock.notice)
