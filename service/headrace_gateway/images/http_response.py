"""Reads one HTTP response, within bounds."""

import httptools

MAX_HEAD_BYTES = 131_072


class ResponseError(Exception):
    """This is not an HTTP response, or its headers are too large, or it ends too soon."""


class HttpResponse:
    """A response that is read. `body` has at most `max_bytes`; then it is `too_large`."""

    def __init__(self, max_bytes: int) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._bytes = self._head_bytes = 0
        self._parser = httptools.HttpResponseParser(self)

    @property
    def body(self) -> bytes:
        return b"".join(self._parts)

    @property
    def too_large(self) -> bool:
        return self._bytes > self._max_bytes

    def feed(self, data: bytes) -> None:
        """Reads more bytes. Raises ResponseError."""
        if not self._bytes:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ResponseError(str(error)) from error
        if not self._bytes and self._head_bytes > MAX_HEAD_BYTES:
            raise ResponseError("its headers are too large")

    def end(self) -> None:
        """Notes that the connection has ended. Raises ResponseError if more was announced."""
        announced = {"content-length", "transfer-encoding"} & self.headers.keys()
        if not self.status or announced:
            raise ResponseError("it ends too soon")
        self.complete = True

    # Called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._bytes += len(data)
        if not self.too_large:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        self.complete = self.status >= 200
