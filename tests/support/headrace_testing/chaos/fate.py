"""Engines that kill themselves at the Moment that a test has named by a signal.

SIGKILL leaves them no time for anything: it is a crash exactly there.
"""

import functools
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from headrace_common.protocol.base import Progress
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_common.wire.messages import Reply, Tokens

from .demands import Moment

# The moments before and after a call, from the call's first argument and its result.
Before = Callable[[Any], Moment | None]
After = Callable[[Any, Any], Moment | None]


class Fate:
    """Decides when this process dies. Must be made in the main thread, which alone may set signal
    handlers."""

    def __init__(self) -> None:
        self._moment: Moment | None = None
        self._by_signal = {moment.signal: moment for moment in Moment}
        for number in self._by_signal:
            signal.signal(number, self._decide)

    def _decide(self, number: int, _frame: FrameType | None) -> None:
        self._moment = self._by_signal[number]

    def meet(self, moment: Moment | None) -> None:
        """Kills the process if this is its moment."""
        if moment is not None and moment is self._moment:
            os.kill(os.getpid(), signal.SIGKILL)


def install(fate: Fate) -> None:
    """Makes the engine queues of this process report their moments to a Fate."""
    for name, (before, after) in _MOMENTS.items():
        setattr(RedisEngineQueue, name, _mortal(name, fate, before, after))


def _mortal(name: str, fate: Fate, before: Before, after: After) -> Callable[..., Awaitable[Any]]:
    inner = getattr(RedisEngineQueue, name)

    @functools.wraps(inner)
    async def call(self: RedisEngineQueue, given: Any, *args: Any, **options: Any) -> Any:
        fate.meet(before(given))
        result = await inner(self, given, *args, **options)
        fate.meet(after(given, result))
        return result

    return call


def _tokens(replies: Mapping[str, Sequence[Reply]]) -> list[Tokens]:
    return [reply for items in replies.values() for reply in items if isinstance(reply, Tokens)]


def _is_nothing(_given: Any) -> None:
    return None


def _is_unsaid(replies: Mapping[str, Sequence[Reply]]) -> Moment | None:
    return Moment.SILENT if _tokens(replies) else None


def _is_said(replies: Mapping[str, Sequence[Reply]], _result: None) -> Moment | None:
    replied = _tokens(replies)
    ended = any(tokens.finish_reason for tokens in replied)
    return Moment.LAST_FRAME if ended else Moment.TOLD if replied else None


def _is_noted(progress: Sequence[Progress], _result: object) -> Moment | None:
    fresh = any(item.executing and not any(item.journaled) for item in progress)
    return Moment.EXECUTING if fresh else None


_MOMENTS: Mapping[str, tuple[Before, After]] = {
    "take": (_is_nothing, lambda _, leases: Moment.TAKEN if leases else None),
    "renew": (_is_nothing, _is_noted),
    "resume": (_is_nothing, lambda _, owned: Moment.RESUMED if owned else None),
    "publish": (_is_unsaid, _is_said),
    "finish": (_is_nothing, lambda _, stored: Moment.FINISHED if stored else None),
}
