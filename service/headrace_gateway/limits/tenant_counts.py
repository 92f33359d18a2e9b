"""Counts what tenants have at the moment."""


class TenantCounts:
    """A number for each tenant; tenants with none take no memory."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        """The number of tenants that have some."""
        return len(self._counts)

    def of(self, tenant: str) -> int:
        return self._counts.get(tenant, 0)

    def add(self, tenant: str) -> None:
        self._counts[tenant] = self.of(tenant) + 1

    def remove(self, tenant: str) -> None:
        if self._counts[tenant] == 1:
            del self._counts[tenant]
        else:
            self._counts[tenant] -= 1
