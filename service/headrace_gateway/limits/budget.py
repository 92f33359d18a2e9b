"""The budget of one request: every bound on what a client can send, in one place.

The size of a body is a setting (`max_body_bytes`); the other bounds follow from what honest clients
need.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bounds on a request's bytes outside of its body, and on the values within it."""

    # Request line and headers. Proxies add some kilobytes of tokens and cookies.
    head_bytes: int = 64 * 1024
    # SDKs send about 20 headers, proxies add about as many.
    headers: int = 128
    # Path and query. Ours hold ids of at most 255 characters.
    target_bytes: int = 8 * 1024
    # Lines of chunks with their extensions, and trailers; none of these bytes are kept.
    framing_bytes: int = 64 * 1024
    # Bytes of a body for which one more byte of framing is allowed: chunks of 48 bytes or more.
    body_bytes_per_framing_byte: int = 8

    # Values of lists and members of objects, at all depths: a prompt of a million token ids.
    values: int = 2**20 + 2**16
    # Texts, and the names of members.
    strings: int = 2**18
    # Lists and objects: 4,096 messages with their parts, 2,048 inputs, 512 tools with schemas.
    containers: int = 2**16
    members: int = 2**16
    # The most members of one object. A wrong object makes a fault for each.
    members_per_object: int = 2048

    @property
    def shortest_json_over_budget(self) -> int:
        """The length of the shortest JSON that can exceed a bound on values."""
        return min(self.containers, self.members, self.strings, self.values)

    def most_overhead(self, body_bytes: int) -> int:
        """Returns the bytes that a request with a body of this length may have outside of it."""
        framing = self.framing_bytes + body_bytes // self.body_bytes_per_framing_byte
        return self.head_bytes + framing
