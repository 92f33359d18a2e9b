"""A small store that speaks S3, with signatures of version 4, for tests of downloads."""

import hashlib
import hmac
from collections.abc import Mapping
from urllib.parse import parse_qsl, quote, urlsplit

from .threaded_server import ScriptedHandler, ThreadedServer

KEY, SECRET, REGION = "AKIATEST", "a secret", "eu-test-1"


class FakeS3(ThreadedServer):
    """Serves `objects`, by bucket and key, to those who sign with KEY and SECRET.

    `fetched` records what was asked for. `cut_once` names an object whose first answer breaks off
    in the middle.
    """

    def __init__(self, objects: Mapping[str, bytes], *, cut_once: str | None = None) -> None:
        self.objects = objects
        self.cut_once = cut_once
        self.fetched: list[str] = []
        super().__init__(_Handler)

    def environment(self) -> dict[str, str]:
        """The environment of a client that may read."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }


class _Handler(ScriptedHandler[FakeS3]):
    def do_GET(self) -> None:
        name = urlsplit(self.path).path.removeprefix("/")
        self.script.fetched.append(name)
        if self.headers["Authorization"] != self._signature():
            self._error(403, "SignatureDoesNotMatch")
        elif name not in self.script.objects:
            self._error(404, "NoSuchKey")
        else:
            self._object(name, self.script.objects[name])

    def _object(self, name: str, content: bytes) -> None:
        span = self.headers["Range"]
        first = int(span.removeprefix("bytes=").partition("-")[0]) if span else 0
        rest = content[first:]
        self.send_response(206 if span else 200)
        if span:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(rest)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Last-Modified", "Sat, 01 Jan 2000 00:00:00 GMT")
        self.end_headers()
        if name == self.script.cut_once:
            self.script.cut_once = None
            rest = rest[: len(rest) // 2]
            self.close_connection = True
        self.wfile.write(rest)

    def _error(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _signature(self) -> str:
        """The header that this request must have: AWS Signature Version 4 over its headers."""
        scope = f"{self.headers['x-amz-date'][:8]}/{REGION}/s3/aws4_request"
        signed = self.headers["Authorization"].partition("SignedHeaders=")[2].partition(",")[0]
        url = urlsplit(self.path)
        query = "&".join(
            f"{quote(name, safe='')}={quote(value, safe='')}"
            for name, value in sorted(parse_qsl(url.query, keep_blank_values=True))
        )
        headers = "".join(f"{name}:{self.headers[name].strip()}\n" for name in signed.split(";"))
        payload = self.headers["x-amz-content-sha256"]
        canonical = "\n".join((self.command, url.path, query, headers, signed, payload))
        text = "\n".join(
            (
                *("AWS4-HMAC-SHA256", self.headers["x-amz-date"], scope),
                hashlib.sha256(canonical.encode()).hexdigest(),
            )
        )
        key = f"AWS4{SECRET}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        return (
            f"AWS4-HMAC-SHA256 Credential={KEY}/{scope}, "
            f"SignedHeaders={signed}, Signature={signature}"
        )
