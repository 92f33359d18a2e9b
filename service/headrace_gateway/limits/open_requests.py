"""Limits a tenant's open requests: those that this gateway has begun and not yet answered."""

from ..errors import busy
from .tenant_counts import TenantCounts


class OpenRequests:
    """Counts the open requests of each tenant; a tenant may have up to `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open = TenantCounts()

    def begin(self, tenant: str) -> None:
        """Counts a request until `end`. Raises ApiError if the tenant has too many."""
        count = self._open.of(tenant)
        if count >= self._most:
            raise busy(
                f"{count} of your requests are open at this server, as many as one tenant may "
                "have; try again when some of them are answered.",
                code="too_many_open_requests",
                of_tenant=True,
            )
        self._open.add(tenant)

    def end(self, tenant: str) -> None:
        self._open.remove(tenant)
