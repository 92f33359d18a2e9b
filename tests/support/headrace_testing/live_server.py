"""A small gateway that streams scripted snapshots at /console/live, for tests of its watchers."""

import json
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from .threaded_server import ScriptedHandler, ThreadedServer


def model(**changes: Any) -> dict[str, Any]:
    return {
        "name": "headrace-demo", "waiting": 3, "running": 16, "oldest_wait": 0.4,
        "waiting_tokens": 900, "limit_requests": 1024, "scaling": None, "starts": [],
        **changes,
    }  # fmt: skip


def engine(**changes: Any) -> dict[str, Any]:
    states = ["prefill", "decode", "decode", "waiting"]
    sequences = [
        {"request": None, "choice": 0, "state": state, "prompt": 120, "computed": 64, "output": 10,
         "max_output": 256, "step_tokens": 32}
        for state in states
    ]  # fmt: skip
    kv = {"total": 4000, "used": 1000, "shared": 64, "cached": 2000, "free": 1000}
    return {
        "id": "host.1.abc", "name": "engine-0", "model": "headrace-demo", "state": "ready",
        "age": 0.2, "detail": True, "steps": 12345, "step_seconds": 0.012,
        "output_tokens_per_s": 812.0, "prompt_tokens_per_s": 77.0, "running": 3, "waiting": 1,
        "preemptions": 5, "kv": {**kv, "block_tokens": 16}, "sequences": sequences,
        "sequences_left_out": 0, **changes,
    }  # fmt: skip


def heartbeat(**changes: Any) -> dict[str, Any]:
    """An engine that has not yet reported its batch."""
    known = ("id", "name", "model", "state", "age", "running")
    return {name: engine()[name] for name in known} | {"detail": False, **changes}


def snapshot(*engines: dict[str, Any], **changes: Any) -> dict[str, Any]:
    console = {"version": "0.1.0", "kill": True, "keys": False}
    return {
        "time": 1790000000.0, "console": console, "models": [model()], "engines": list(engines),
        "engines_left_out": 0, "stale": False, **changes,
    }  # fmt: skip


class LiveServer(ThreadedServer):
    """Answers each GET /console/live with the next of `answers`: a status, or snapshots to send.

    The stream stays open after an answer's snapshots, but ends after those of the second to last
    answer.
    """

    def __init__(self, *answers: int | Sequence[dict[str, Any]], key: str | None = None) -> None:
        self.answers = list(answers)
        self.key = key
        self.stopping = threading.Event()
        super().__init__(_Handler)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stopping.set()
        super().__exit__(kind, error, trace)


class _Handler(ScriptedHandler[LiveServer]):
    def do_GET(self) -> None:
        script = self.script
        if script.key and self.headers["Authorization"] != f"Bearer {script.key}":
            self._refuse(401)
            return
        answer = script.answers.pop(0) if self.path == "/console/live" else 404
        if isinstance(answer, int):
            self._refuse(answer)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for each in answer:
            self.wfile.write(f"event: snapshot\ndata: {json.dumps(each)}\n\n".encode())
        if not script.answers:
            script.stopping.wait()

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
