"""What replies to requests that are not in flight here mean, and which are answered with a Disown.

An engine that runs a request without a client here gets a Disown, but not for each frame that was
on its way when the request ended. It remembers a bounded number of requests; forgetting one costs a
message.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from headrace_common.wire.messages import Disown, Failed, Reply, Sync, Takeover

REMEMBERED = 10_000

K = TypeVar("K", bound=Hashable)


class _Times(Generic[K]):
    """The times of the last REMEMBERED events, by key."""

    def __init__(self) -> None:
        self._times: OrderedDict[K, float] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._times

    def note(self, key: K, now: float) -> None:
        self._times[key] = now
        self._times.move_to_end(key)
        if len(self._times) > REMEMBERED:
            self._times.popitem(last=False)

    def within(self, key: K, seconds: float, now: float) -> bool:
        at = self._times.get(key)
        return at is not None and now - at < seconds

    def forget(self, key: K) -> None:
        self._times.pop(key, None)


class LateReplies:
    """Times are in seconds: for `silence` seconds frames may still come, and an engine gets one
    Disown."""

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._ended: _Times[str] = _Times()
        self._left: _Times[str] = _Times()
        self._disowned: _Times[tuple[str, str]] = _Times()

    def begun(self, request_id: str) -> None:
        self._left.forget(request_id)

    def ended(self, request_id: str, now: float) -> None:
        self._ended.note(request_id, now)

    def left(self, request_id: str, now: float) -> None:
        """Notes that a request continues without this gateway."""
        self._left.note(request_id, now)

    def has_left(self, request_id: str) -> bool:
        """Whether a request continues without this gateway."""
        return request_id in self._left

    def answer(self, engine_id: str, reply: Reply, now: float) -> Disown | None:
        """Returns the Disown for the engine that sent this reply, or None."""
        rid, key = reply.request_id, (engine_id, reply.request_id)
        if rid in self._left:
            return None
        if not isinstance(reply, Takeover | Sync) and (
            self._ended.within(rid, self._silence, now)
            or self._disowned.within(key, self._silence, now)
            or getattr(reply, "finish_reason", None)
        ):
            return None
        self._disowned.note(key, now)
        return Disown(request_id=rid, attempt=reply.attempt, superseded=False)

    def runs_again(self, reply: Reply, now: float) -> bool:
        """Whether a request that ended here may end once more, since Redis has lost its end."""
        rid = reply.request_id
        if rid in self._left:
            return False
        if isinstance(reply, Takeover | Sync | Failed):
            return True
        # Earlier frames were on their way when it ended. One of the others is enough.
        last = getattr(reply, "finish_reason", None) is not None
        return last and rid in self._ended and not self._ended.within(rid, self._silence, now)
