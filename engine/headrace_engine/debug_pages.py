"""What an engine shows of its inside, on the port of its metrics: JSON, never a user's content.

    GET  /debug/steps     the last steps: what they computed, how long they took, what was left over
    GET  /debug/requests  the requests it has: state, tokens, for how long nothing came of them
    POST /debug/profile   ?steps=20&timeout=60: the next steps as a Chrome trace

All run on threads of the metrics server and read what other threads write.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from http import HTTPStatus

from headrace_common.metrics_server import Page, PageAnswer, json_answer

from .active import ActiveRequest
from .engine import Engine
from .profiling import ProfileRefused, StepProfiler
from .step_log import StepLog

MOST_STEPS, MOST_SECONDS = 1000, 300


class DebugPages:
    def __init__(
        self,
        engine: Engine,
        log: StepLog,
        profiler: StepProfiler,
        requests: Callable[[], Collection[ActiveRequest]],
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
        return json_answer(
            {
                "steps": self._log.steps,
                "stalled_for": self._stalled_for(),
                "last": [asdict(record) for record in self._log.records()],
            }
        )

    def _show_requests(self, _query: Mapping[str, str]) -> PageAnswer:
        sequences = self._engine.sequences()
        now = time.monotonic()
        return json_answer(
            {
                "requests": [
                    {
                        "request_id": active.request_id,
                        "attempt": active.attempt,
                        "tenant": active.request.tenant,
                        "prompt_tokens": len(active.request.prompt_token_ids),
                        "output_tokens": [len(choice.token_ids) for choice in active.choices],
                        "unmoved_for": now - active.moved,
                        "sequences": [asdict(one) for one in sequences.get(active.engine_key, ())],
                    }
                    for active in list(self._requests())
                ]
            }
        )

    def _profile(self, query: Mapping[str, str]) -> PageAnswer:
        try:
            steps = _whole(query, "steps", 20, MOST_STEPS)
            timeout = _whole(query, "timeout", 60, MOST_SECONDS)
        except ValueError as error:
            return json_answer({"error": str(error)}, HTTPStatus.BAD_REQUEST)
        try:
            trace = self._profiler.record(steps, timeout)
        except ProfileRefused as error:
            return json_answer({"error": str(error)}, HTTPStatus.CONFLICT)
        return HTTPStatus.OK, "application/json", trace


def _whole(query: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = query.get(name, str(default))
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= most:
        raise ValueError(f"{name} must be a whole number from 1 to {most}, not {text[:20]!r}")
    return int(text)
