"""An HTTP server in a thread of its own, for the scripted servers of tests."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Generic, Self, TypeVar

Script = TypeVar("Script")


class ThreadedServer:
    """Serves on a free port while the block runs. `handler` answers the requests; `host` is the
    address that it listens on."""

    def __init__(self, handler: "type[ScriptedHandler[Self]]", host: str = "127.0.0.1") -> None:
        self._http = _Server(self, handler, host)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))

    @property
    def port(self) -> int:
        return self._http.server_port

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

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
    request_queue_size = 64  # clients may connect all at once

    def __init__(self, script: object, handler: type[BaseHTTPRequestHandler], host: str) -> None:
        self.script = script
        super().__init__((host, 0), handler)


class ScriptedHandler(BaseHTTPRequestHandler, Generic[Script]):
    """Answers requests of the server `script`. Logs nothing."""

    @property
    def script(self) -> Script:
        return self.server.script  # type: ignore[attr-defined,no-any-return]  # it is a _Server

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""
