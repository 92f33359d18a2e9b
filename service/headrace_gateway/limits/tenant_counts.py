"""Counts requests or other things of each tenant."""


class TenantCounts:
    """A count for each tenant. A tenant whose count is 0 takes no memory."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        """The number of tenants whose count is not 0."""
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
