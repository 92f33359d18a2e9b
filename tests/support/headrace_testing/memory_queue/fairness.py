"""Orders waiting requests in memory, by the same rules as lua/joining.lua and lua/leaving.lua."""

from collections.abc import Iterator, Mapping
from itertools import count
from math import floor

from headrace_common.protocol.base import TenantUse
from headrace_common.protocol.redis.queue_position import turns_ahead

OUTPUT = 2
DEBT = 65_536
TENANTS_SEEN = 16


_EPOCHS = count(1)


def cost(tokens: int, weight: float) -> int:
    """What tokens cost a tenant of this weight."""
    return floor(tokens / weight + 0.5)


class Counters:
    """The tokens that each tenant has used, as far as they count.

    The key "" is the tenant served last.
    """

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        self._here: dict[str, int] = {}
        self._elsewhere: dict[int, TenantUse] = {}
        self._epoch = str(next(_EPOCHS))

    def used(self, tenant: str) -> int:
        return self._used.get(tenant, 0)

    def charge(self, tenant: str, tokens: int) -> None:
        if tokens > 0:
            self._used[tenant] = self.used(tenant) + tokens
            self._here[tenant] = self._here.get(tenant, 0) + tokens

    def tally(self) -> TenantUse:
        return TenantUse(self._epoch if self._here else "", dict(self._here))

    def share(self, uses: Mapping[int, TenantUse]) -> None:
        for shard, use in uses.items():
            known = self._elsewhere.get(shard)
            if known is not None and known.epoch == use.epoch:
                for tenant, tokens in use.tokens.items():
                    more = tokens - known.tokens.get(tenant, 0)
                    self._used[tenant] = self.used(tenant) + max(0, more)
            self._elsewhere[shard] = use

    def serve(self, tenant: str, tokens: int) -> None:
        self.charge(tenant, tokens)
        self._used[""] = self.used(tenant)

    def begin(self, tenant: str, lowest: int | None) -> None:
        floor = self.used("") if lowest is None else lowest
        self._used[tenant] = min(max(self.used(tenant), floor), floor + DEBT)


class FairQueue:
    """Waiting requests of one priority: the stream's unread entries, then the lists of tenants."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._stream: list[str] = []
        self._lists: dict[str, list[str]] = {}

    def __len__(self) -> int:
        return len(self._stream) + sum(map(len, self._lists.values()))

    def __iter__(self) -> Iterator[str]:
        yield from self._stream
        for requests in self._lists.values():
            yield from requests

    def add(self, request_id: str, tenant: str) -> None:
        if not len(self):
            self._stream.append(request_id)
            return
        if tenant not in self._lists:
            lowest = min(map(self._counters.used, self._lists), default=None)
            self._counters.begin(tenant, lowest)
        self._lists.setdefault(tenant, []).append(request_id)

    def first(self) -> str | None:
        """The next request, which stays in the queue."""
        if not self._stream:
            self._refill()
        return self._stream[0] if self._stream else None

    def pop(self) -> str:
        return self._stream.pop(0)

    def blocked(self, request_id: str) -> bool:
        """Whether the request is in its tenant's list."""
        return any(request_id in requests for requests in self._lists.values())

    def oldest(self) -> list[str]:
        """The first requests in the lists of the tenants that are next."""
        return [self._lists[tenant][0] for tenant in self._by_use()[:TENANTS_SEEN]]

    def pass_over(self, request_id: str) -> None:
        """Puts a blocked request before the next one."""
        for tenant, requests in list(self._lists.items()):
            if request_id in requests:
                requests.remove(request_id)
                self._forget(tenant)
        self._stream += [request_id, self._stream.pop(0)]

    def remove(self, request_id: str) -> None:
        if request_id in self._stream:
            self._stream.remove(request_id)
        for tenant, requests in list(self._lists.items()):
            if request_id in requests:
                requests.remove(request_id)
                self._forget(tenant)
        self.keep_head()

    def keep_head(self) -> None:
        if not self._stream:
            self._refill()

    def ahead(self, request_id: str) -> int | None:
        """Counts the requests of this priority ahead, as the Redis script does; None if it does not
        wait here."""
        if request_id in self._stream:
            return 0
        for requests in self._lists.values():
            if request_id in requests:
                return turns_ahead(requests.index(request_id), len(self._lists), len(self))
        return None

    @property
    def newest(self) -> str | None:
        """The newest entry of the stream; engines may wait for a newer one."""
        return self._stream[-1] if self._stream else None

    def _refill(self) -> None:
        if self._lists:
            tenant = self._by_use()[0]
            self._stream.append(self._lists[tenant].pop(0))
            self._forget(tenant)

    def _by_use(self) -> list[str]:
        """Tenants with lists, those that have used the least first."""
        return sorted(self._lists, key=lambda name: (self._counters.used(name), name.encode()))

    def _forget(self, tenant: str) -> None:
        if not self._lists[tenant]:
            del self._lists[tenant]
