"""Limits a tenant's open requests: those that this gateway has begun and not yet answered."""

from ..errors import busy


class OpenRequests:
    """Counts the open requests of each tenant; one tenant may have `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[str, int] = {}

    def begin(self, tenant: str) -> None:
        """Counts a request until `end`. Raises ApiError if the tenant has too many."""
        count = self._open.get(tenant, 0)
        if count >= self._most:
            raise busy(
                f"{count} of your requests are open at this server, as many as one tenant may "
                "have; try again when some of them are answered.",
                code="too_many_open_requests",
                of_tenant=True,
            )
        self._open[tenant] = count + 1

    def end(self, tenant: str) -> None:
        if self._open[tenant] == 1:
            del self._open[tenant]
        else:
            self._open[tenant] -= 1
