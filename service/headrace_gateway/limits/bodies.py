"""Bytes of bodies that have been received and not yet read: few clients could fill the memory."""

from collections import Counter

from ..errors import unavailable

# Of all tenants together, and of one.
MOST_BYTES = 256 * 2**20
MOST_BYTES_OF_TENANT = 128 * 2**20


class Bodies:
    """What this process holds of them."""

    def __init__(self, most: int = MOST_BYTES, most_of_tenant: int = MOST_BYTES_OF_TENANT) -> None:
        self._most = most
        self._most_of_tenant = most_of_tenant
        self._held: Counter[str] = Counter()

    def open(self, tenant: str) -> "HeldBody":
        return HeldBody(self, tenant)

    def add(self, tenant: str, size: int) -> None:
        """Raises ApiError where that is too much."""
        of_tenant = self._held[tenant] + size
        if of_tenant > self._most_of_tenant or self._held.total() + size > self._most:
            raise unavailable(
                "Too many large request bodies at once; send them one after the other.",
                code="too_many_bodies",
            )
        self._held[tenant] = of_tenant

    def drop(self, tenant: str, size: int) -> None:
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]


class HeldBody:
    """One of them."""

    __slots__ = ("_bodies", "_size", "_tenant")

    def __init__(self, bodies: Bodies, tenant: str) -> None:
        self._bodies = bodies
        self._tenant = tenant
        self._size = 0

    def add(self, size: int) -> None:
        """Raises ApiError where all together are too much."""
        self._bodies.add(self._tenant, size)
        self._size += size

    def drop(self) -> None:
        """It has been read, or nobody will; called again, does nothing."""
        self._bodies.drop(self._tenant, self._size)
        self._size = 0
