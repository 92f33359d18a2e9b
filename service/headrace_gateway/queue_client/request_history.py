"""The history of the last requests of this gateway, in memory: their times, engines and ends.

It holds no prompt or output. Requests of a tenant, tenants and events are limited in number.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from headrace_common.errors import FailureCode
from headrace_common.protocol.arbiter import Action, Arbiter, Deliver
from headrace_common.wire.messages import Failed, GenerateRequest, Reply, Tokens

MAX_REQUESTS, MAX_TENANTS = 100, 256
MAX_EVENTS, MAX_ENGINES = 24, 8
_CANCELLED = frozenset({FailureCode.CANCELLED, FailureCode.ABANDONED})
_EMBEDDINGS = "/v1/embeddings"
_DIGITS = 4  # of seconds


class Timeline:
    """One request. `clock` gives Unix seconds of Redis. Times are None until they are known."""

    __slots__ = (
        "_clock",
        "_arbiter",
        "_cached_tokens",
        "_engines",
        "_ended",
        "_error",
        "_events",
        "_first_token",
        "_preempted",
        "_request",
        "_started",
        "accepted",
        "path",
    )

    def __init__(
        self, request: GenerateRequest, arbiter: Arbiter, clock: Callable[[], float]
    ) -> None:
        self._request = replace(request, images=())  # images are not kept after its end
        self._arbiter = arbiter
        self._clock = clock
        self.path: str | None = None if request.pooling is None else _EMBEDDINGS
        self.accepted = clock()
        self._started: float | None = None
        self._first_token: float | None = None
        self._ended: float | None = None
        self._error: str | None = None
        self._cached_tokens = 0
        self._preempted = False
        self._engines: list[str] = []
        self._events: list[tuple[float, str, str | None]] = []
        self._note("accepted", self.accepted)

    @property
    def model(self) -> str:
        return self._request.lora or self._request.model

    def answered(self, engine_id: str, reply: Reply, actions: Sequence[Action]) -> None:
        """Notes the news of a reply that the arbiter has accepted from the engine."""
        owner, now = self._arbiter.owner, self._clock()
        if owner is not None and owner[0] == engine_id and engine_id not in self._engines[-1:]:
            self._taken(engine_id, reply, now)
        for action in actions:
            if isinstance(action, Deliver):
                self._cached_tokens = max(self._cached_tokens, action.cached_tokens)
                if self._first_token is None:
                    self._first_token = now
                    self._note("first_token", now, engine_id)

    def _taken(self, engine_id: str, reply: Reply, now: float) -> None:
        if self._started is None:
            took = reply.took_ms if isinstance(reply, Tokens) else None
            self._started = max(self.accepted, now - (took or 0) / 1000)
            self._note("started", self._started, engine_id)
        else:
            self._note("moved", now, engine_id)
        if len(self._engines) < MAX_ENGINES:
            self._engines.append(engine_id)
        else:
            self._engines[-1] = engine_id

    def seen(self, engine_id: str, age: float, *, preempted: bool) -> None:
        """Notes an engine's snapshot, in which the request was `age` seconds old."""
        if self._ended is not None:
            return
        now = self._clock()
        if self._started is None:
            self._started = max(self.accepted, now - age)
            self._note("started", self._started, engine_id)
            self._engines.append(engine_id)
        if preempted and not self._preempted:
            self._note("preempted", now, engine_id)
        self._preempted = preempted

    def end(self, failure: Failed | None) -> None:
        """Notes the end of the request. Must be called only once."""
        self._ended = self._clock()
        self._error = None if failure is None else failure.failure.value
        self._note("ended", self._ended, self._engines[-1] if self._engines else None)

    def content(self) -> dict[str, Any]:
        """The request as JSON's content."""
        request, reasons = self._request, self._arbiter.finish_reasons
        choices = range(request.sampling.n)
        return {
            "id": request.request_id,
            "model": self.model,
            "path": self.path,
            "state": self._state,
            "finish_reason": None if self._error else next(filter(None, reasons), None),
            "error": self._error,
            "prompt_tokens": len(request.prompt_token_ids),
            "cached_tokens": self._cached_tokens,
            "output_tokens": sum(map(self._arbiter.token_count, choices)),
            "engines": list(self._engines),
            "times": {
                "accepted": _rounded(self.accepted),
                "started": _rounded(self._started),
                "first_token": _rounded(self._first_token),
                "ended": _rounded(self._ended),
            },
            "events": [
                {"time": _rounded(at), "what": what, "engine": engine}
                for at, what, engine in self._events
            ],
        }

    @property
    def _state(self) -> str:
        if self._ended is None:
            return "running"
        if self._error is None:
            return "finished"
        return "cancelled" if self._error in _CANCELLED else "failed"

    def _note(self, what: str, at: float, engine_id: str | None = None) -> None:
        """Adds an event; at MAX_EVENTS it replaces the last one, so that the end is kept."""
        if len(self._events) == MAX_EVENTS:
            self._events.pop()
        self._events.append((at, what, engine_id))


class RequestHistory:
    """The timelines of this gateway's requests, the last of each tenant. Use on one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tenants: OrderedDict[str, OrderedDict[str, Timeline]] = OrderedDict()

    def begin(self, request: GenerateRequest, arbiter: Arbiter) -> Timeline | None:
        """Begins a timeline; None for a request that is known, whose answer is read again."""
        known = self._tenants.setdefault(request.tenant, OrderedDict())
        self._tenants.move_to_end(request.tenant)
        if request.request_id in known:
            return None
        timeline = known[request.request_id] = Timeline(request, arbiter, self._clock)
        if len(known) > MAX_REQUESTS:
            known.popitem(last=False)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return timeline

    def forget(self, request: GenerateRequest) -> None:
        """Forgets a request that was refused, or that is another gateway's now."""
        self._tenants.get(request.tenant, OrderedDict()).pop(request.request_id, None)

    def find(self, tenant: str, request_id: str) -> Timeline | None:
        known = self._tenants.get(tenant)
        return None if known is None else known.get(request_id)

    def note_path(self, path: str, requests: Sequence[GenerateRequest]) -> None:
        """Notes the path of the HTTP request that sent these."""
        for request in requests:
            timeline = self.find(request.tenant, request.request_id)
            if timeline is not None:
                timeline.path = path

    def of(self, tenant: str) -> list[Timeline]:
        """A tenant's requests, the newest first."""
        return list(reversed(self._tenants.get(tenant, OrderedDict()).values()))


def _rounded(at: float | None) -> float | None:
    return None if at is None else round(at, _DIGITS)
