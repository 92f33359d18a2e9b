"""The engine's sleep by HTTP, on the port of its metrics, with vLLM's names.

    POST /sleep        ?level=1: gives memory back once running requests have ended or been given
                       back; answers when the engine sleeps
    POST /wake_up      takes the memory again; answers when the engine is awake
    GET  /is_sleeping  whether it sleeps

The handlers run on threads of the metrics server.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from http import HTTPStatus
from typing import Any

from headrace_common.observability.metrics_server import Page, PageAnswer, json_response

from ..core.config import SleepLevel
from .sleeper import Sleeper

LEVELS: Mapping[str, SleepLevel] = {"1": 1, "2": 2}


class SleepPages:
    """The pages of one engine, whose sleeper lives on `event_loop`."""

    def __init__(self, sleeper: Sleeper, event_loop: asyncio.AbstractEventLoop) -> None:
        self._sleeper, self._event_loop = sleeper, event_loop

    def pages(self) -> Mapping[str, Page]:
        return {
            "/sleep": Page("POST", self._sleep),
            "/wake_up": Page("POST", self._wake_up),
            "/is_sleeping": Page("GET", lambda _query: self._state()),
        }

    def _sleep(self, query: Mapping[str, str]) -> PageAnswer:
        level = LEVELS.get(query.get("level", "1"))
        if level is None or query.keys() - {"level"}:
            error = f"the query must be level=1 or level=2, not {dict(query)!r:.80}"
            return json_response({"error": error}, HTTPStatus.BAD_REQUEST)
        return self._after(self._sleeper.sleep(level))

    def _wake_up(self, query: Mapping[str, str]) -> PageAnswer:
        if query:
            error = f"the engine wakes as a whole: leave out {dict(query)!r:.80}"
            return json_response({"error": error}, HTTPStatus.BAD_REQUEST)
        return self._after(self._sleeper.wake_up())

    def _after(self, change: Coroutine[Any, Any, bool]) -> PageAnswer:
        """The state after a change; 409 if another call has prevented it."""
        done = asyncio.run_coroutine_threadsafe(change, self._event_loop).result()
        return self._state(HTTPStatus.OK if done else HTTPStatus.CONFLICT)

    def _state(self, status: HTTPStatus = HTTPStatus.OK) -> PageAnswer:
        level = self._sleeper.level
        return json_response({"is_sleeping": level is not None, "level": level or 0}, status)
