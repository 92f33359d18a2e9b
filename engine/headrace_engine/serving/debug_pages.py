"""The engine's debug pages, on the port of its metrics: JSON without any user's content.

    GET  /debug/steps     the last steps: what they computed, how long they took, what still waited
    GET  /debug/requests  the leased requests: state, tokens, seconds since their last output
    POST /debug/profile   ?steps=20&timeout=60: the next steps as a Chrome trace

The handlers run on threads of the metrics server and read what other threads write.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from http import HTTPStatus

from headrace_common.observability.metrics_server import Page, PageAnswer, json_response

from ..engine.engine import Engine
from ..engine.profiler import ProfileRefused, StepProfiler
from .leased_request import LeasedRequest
from .step_log import StepLog

MAX_STEPS, MAX_TIMEOUT_S = 1000, 300


class DebugPages:
    """The pages of one engine. `requests` is a live view of its leased requests."""

    def __init__(
        self,
        engine: Engine,
        log: StepLog,
        profiler: StepProfiler,
        requests: Collection[LeasedRequest],
        stalled_for: Callable[[], float],
    ) -> None:
        self._engine, self._log, self._profiler = engine, log, profiler
        self._requests, self._stalled_for = requests, stalled_for

    def pages(self) -> Mapping[str, Page]:
        return {
            "/debug/steps": Page("GET", self._show_steps),
            "/debug/requests": Page("GET", self._show_requests),
            "/debug/profile": Page("POST", self._profile),
        }

    def _show_steps(self, _query: Mapping[str, str]) -> PageAnswer:
        return json_response(
            {
                "steps": self._log.steps,
                "stalled_for": self._stalled_for(),
                "last": [asdict(record) for record in self._log.records()],
            }
        )

    def _show_requests(self, _query: Mapping[str, str]) -> PageAnswer:
        sequences = self._engine.sequences()
        now = time.monotonic()
        return json_response(
            {
                "requests": [
                    {
                        "request_id": leased.request_id,
                        "attempt": leased.attempt,
                        "tenant": leased.request.tenant,
                        "prompt_tokens": len(leased.request.prompt_token_ids),
                        "output_tokens": [len(choice.token_ids) for choice in leased.choices],
                        "unmoved_for": now - leased.last_output_at,
                        "sequences": [asdict(one) for one in sequences.get(leased.engine_key, ())],
                    }
                    for leased in list(self._requests)
                ]
            }
        )

    def _profile(self, query: Mapping[str, str]) -> PageAnswer:
        try:
            steps = _positive_int(query, "steps", 20, MAX_STEPS)
            timeout = _positive_int(query, "timeout", 60, MAX_TIMEOUT_S)
        except ValueError as error:
            return json_response({"error": str(error)}, HTTPStatus.BAD_REQUEST)
        try:
            trace = self._profiler.record(steps, timeout)
        except ProfileRefused as error:
            return json_response({"error": str(error)}, HTTPStatus.CONFLICT)
        return HTTPStatus.OK, "application/json", trace


def _positive_int(query: Mapping[str, str], name: str, default: int, maximum: int) -> int:
    text = query.get(name, str(default))
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not 1 <= value <= maximum:
        raise ValueError(f"{name} must be a whole number from 1 to {maximum}, not {text[:20]!r}")
    return value
