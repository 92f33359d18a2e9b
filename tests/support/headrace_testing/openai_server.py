"""A small OpenAI-compatible server with scripted answers, for tests of clients."""

import json
import threading
from dataclasses import dataclass, field
from typing import Any

from .threaded_server import ScriptedHandler, ThreadedServer


@dataclass(frozen=True)
class Answer:
    """An answer.

    If it `stalls`, it sends nothing more after its pieces until the client hangs up.
    """

    pieces: tuple[str, ...] = ()
    reasoning: tuple[str, ...] = ()
    status: int = 200
    error: str = ""
    error_event: str = ""
    stalls: bool = False


@dataclass
class Recorded:
    body: dict[str, Any]
    authorization: str | None
    hung_up: threading.Event = field(default_factory=threading.Event)


class OpenAIServer(ThreadedServer):
    """Answers POST /v1/chat/completions with `answers` in turn; `requests` records them."""

    def __init__(self, *answers: Answer, model: str = "scripted") -> None:
        self.answers = list(answers)
        self.requests: list[Recorded] = []
        self.model = model
        super().__init__(_Handler)

    @property
    def url(self) -> str:
        return f"{self.address}/v1"


class _Handler(ScriptedHandler[OpenAIServer]):
    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self._json(404, {"error": {"message": "Invalid URL"}})
            return
        self._json(200, {"object": "list", "data": [{"id": self.script.model, "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        recorded = Recorded(body, self.headers.get("Authorization"))
        self.script.requests.append(recorded)
        answer = self.script.answers.pop(0)
        if answer.error:
            self._json(answer.status, {"error": {"message": answer.error, "type": "x"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self._stream(answer, recorded)

    def _stream(self, answer: Answer, recorded: Recorded) -> None:
        self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for text in answer.reasoning:
            self._event({"choices": [{"delta": {"reasoning_content": text}}]})
        for text in answer.pieces:
            self._event({"choices": [{"delta": {"content": text}}]})
        if answer.stalls:
            self.connection.recv(1)  # returns when the client hangs up
            recorded.hung_up.set()
            return
        if answer.error_event:
            self._event({"error": {"message": answer.error_event}})
            return
        self._event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        self._event({"choices": [], "usage": {"total_tokens": 3}})
        self.wfile.write(b": ping\n\ndata: [DONE]\n\n")

    def _event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def _json(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
