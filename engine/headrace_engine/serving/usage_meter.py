"""Measures what one attempt at a request uses, for the ledger: its time in the engine's core, and
its KV over time.

The KV is that of all its tokens, at the model's bytes per token: prefixes that other requests share
count for each of them, and a preempted request keeps its tokens.
"""

from collections.abc import Callable
from time import monotonic

from headrace_common.protocol.ledger import AttemptUsage


class UsageMeter:
    """Runs while the request is in the engine's core. `clock` gives seconds."""

    __slots__ = ("_clock", "_kv_bytes_per_token", "_seconds", "_since", "_token_seconds", "_tokens")

    def __init__(self, kv_bytes_per_token: float, clock: Callable[[], float] = monotonic) -> None:
        self._kv_bytes_per_token = kv_bytes_per_token
        self._clock = clock
        self._seconds = self._token_seconds = 0.0
        self._since: float | None = None  # the time of the last reading; None: it does not run
        self._tokens = 0

    def start(self, tokens: int) -> None:
        self._since, self._tokens = self._clock(), tokens

    def stop(self, tokens: int) -> None:
        self._count(tokens)
        self._since = None

    def read(self, tokens: int, cached_tokens: int) -> AttemptUsage:
        """What the attempt has used; since the last reading its tokens have grown evenly."""
        self._count(tokens)
        return AttemptUsage(
            engine_ms=round(self._seconds * 1000),
            kv_byte_seconds=round(self._token_seconds * self._kv_bytes_per_token),
            cached_tokens=cached_tokens,
        )

    def _count(self, tokens: int) -> None:
        if self._since is None:
            return
        now = self._clock()
        passed = now - self._since
        self._seconds += passed
        self._token_seconds += passed * (self._tokens + tokens) / 2
        self._since, self._tokens = now, tokens
