"""The budget of one request: every bound on what a client can send, in one place.

The size of a body is a setting (`max_body_bytes`); all else follows from what honest clients need.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bounds on a request's bytes outside of its body."""

    # Request line and headers. Proxies add some kilobytes of tokens and cookies.
    head_bytes: int = 64 * 1024
    # SDKs send about 20 headers, proxies add about as many.
    headers: int = 128
    # Path and query. Ours hold ids of at most 255 characters.
    target_bytes: int = 8 * 1024
    # Lines of chunks with their extensions, and trailers; all of them are thrown away.
    framing_bytes: int = 64 * 1024
    # Bytes of a body for which one more byte of framing is allowed: chunks of 48 bytes or more.
    body_bytes_per_framing_byte: int = 8

    def most_overhead(self, body_bytes: int) -> int:
        """Bytes that a request with a body of this length may have outside of it."""
        framing = self.framing_bytes + body_bytes // self.body_bytes_per_framing_byte
        return self.head_bytes + framing
