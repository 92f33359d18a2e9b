"""How an engine shares its accelerator with engines of other models."""

from dataclasses import dataclass

from headrace_common.protocol.turns import TurnBounds

from ..core.config import SleepLevel


@dataclass(frozen=True, slots=True)
class SharingConfig:
    """The engine sleeps at `level` while another one is awake.

    In seconds, a switch waits `timeout` for running requests, and the slot's lease lasts `lease`.
    """

    level: SleepLevel = 1
    bounds: TurnBounds = TurnBounds()
    timeout: float = 10.0
    lease: float = 10.0
