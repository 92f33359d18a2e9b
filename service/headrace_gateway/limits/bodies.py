"""Limits the bytes of buffered bodies: otherwise a few clients could fill the memory."""

from collections import Counter

from ..errors import unavailable

# Limits of all tenants together, and of one tenant.
MOST_BYTES = 256 * 2**20
MOST_BYTES_OF_TENANT = 128 * 2**20


class BodyBuffers:
    """Counts the bytes of bodies that this process has buffered."""

    def __init__(self, most: int = MOST_BYTES, most_of_tenant: int = MOST_BYTES_OF_TENANT) -> None:
        self._most = most
        self._most_of_tenant = most_of_tenant
        self._buffered: Counter[str] = Counter()

    def open(self, tenant: str) -> "BufferedBody":
        return BufferedBody(self, tenant)

    def add(self, tenant: str, size: int) -> None:
        """Raises ApiError if the tenant's bytes, or all bytes, would be over their limit."""
        of_tenant = self._buffered[tenant] + size
        if of_tenant > self._most_of_tenant or self._buffered.total() + size > self._most:
            raise unavailable(
                "Too many large request bodies at once; send them one after the other.",
                code="too_many_bodies",
            )
        self._buffered[tenant] = of_tenant

    def drop(self, tenant: str, size: int) -> None:
        self._buffered[tenant] -= size
        if not self._buffered[tenant]:
            del self._buffered[tenant]


class BufferedBody:
    """Counts the bytes of one body."""

    __slots__ = ("_bodies", "_size", "_tenant")

    def __init__(self, bodies: BodyBuffers, tenant: str) -> None:
        self._bodies = bodies
        self._tenant = tenant
        self._size = 0

    def add(self, size: int) -> None:
        """Raises ApiError if all bodies together would be over the limit."""
        self._bodies.add(self._tenant, size)
        self._size += size

    def drop(self) -> None:
        """Ends the count: the body was read, or will not be. Later calls do nothing."""
        self._bodies.drop(self._tenant, self._size)
        self._size = 0
