"""An HTTP server in a thread of its own, for the scripted servers of tests."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Generic, Self, TypeVar

Script = TypeVar("Script")


class ThreadedServer:
    """Serves on a free port of loopback while the block runs. `handler` answers the requests."""

    def __init__(self, handler: "type[ScriptedHandler[Self]]") -> None:
        self._http = _Server(self, handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: object, handler: type[BaseHTTPRequestHandler]) -> None:
        self.script = script
        super().__init__(("127.0.0.1", 0), handler)


class ScriptedHandler(BaseHTTPRequestHandler, Generic[Script]):
    """Answers requests of the server `script`. Logs nothing."""

    @property
    def script(self) -> Script:
        return self.server.script  # type: ignore[attr-defined,no-any-return]  # it is a _Server

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""
