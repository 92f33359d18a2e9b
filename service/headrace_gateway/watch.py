"""When a request in flight is asked about, and when its engine counts as silent."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Times in seconds.

    `silence`: an engine that sent nothing for this long is given up. `recheck`: a request of which
    nothing was heard is asked about after this long, then twice, up to `longest_recheck`.
    """

    beat_interval: float = 3.0
    silence: float = 2.5
    recheck: float = 2.5
    longest_recheck: float = 20.0


@dataclass(slots=True)
class Watch:
    """When a generation is next asked about, and which engine is then believed to have it.

    `released`: the engine and attempt that it was taken from, while nobody else has it. `lost`: an
    engine has ended it without having to, which is asked about at once.
    """

    due: float
    pause: float
    suspect: tuple[str, int] | None = None
    suspected_at: float = 0.0
    released: tuple[str, int] | None = None
    lost: bool = False
