"""A small Hugging Face hub with one repository, for tests of downloads."""

import hashlib
import json
from collections.abc import Mapping

from .threaded_server import ScriptedHandler, ThreadedServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadedServer):
    """Serves `files` of `repository`. `cut_once` names a file whose first answer breaks off in the
    middle. `ranges` and `fetched` record the requests."""

    def __init__(
        self, repository: str, files: Mapping[str, bytes], *, cut_once: str | None = None
    ) -> None:
        self.repository = repository
        self.files = files
        self.cut_once = cut_once
        self.fetched: list[str] = []
        self.ranges: list[str] = []
        super().__init__(_Handler)


class _Handler(ScriptedHandler[FakeHub]):
    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub = self.script
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{hub.repository}/tree/"):
            self._json(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
                    for name, content in hub.files.items()
                ]
            )
        elif path.startswith(f"/api/models/{hub.repository}"):
            files = [
                {"rfilename": name, "size": len(content)} for name, content in hub.files.items()
            ]
            self._json({"id": hub.repository, "sha": COMMIT, "siblings": files})
        elif path.startswith(f"/{hub.repository}/resolve/"):
            self._file(path.rsplit("/", 1)[1], body=body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _file(self, name: str, *, body: bool) -> None:
        hub = self.script
        content = hub.files[name]
        wanted, start = self.headers["Range"], 0
        if wanted:
            hub.ranges.append(f"{name} {wanted}")
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
        rest = content[start:]
        self.send_response(206 if wanted else 200)
        if wanted:
            span = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.send_header("Content-Range", span)
        self.send_header("ETag", f'"{_digest(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if not body:
            return
        if name not in hub.fetched:
            hub.fetched.append(name)
        if hub.cut_once == name:
            hub.cut_once = None
            rest = rest[: len(rest) // 2]
        self.wfile.write(rest)

    def _json(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
