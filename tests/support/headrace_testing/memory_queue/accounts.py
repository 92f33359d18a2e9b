"""Accounts of the data that tenants store in a MemoryBackend, which behave like those in Redis."""

from collections.abc import Iterable, Mapping

from headrace_common.protocol.accounts import Item, ItemKind, Quota, QuotaExceeded, full, member_of

from .backend import MemoryBackend


class MemoryAccounts:
    """See Accounts."""

    def __init__(self, backend: MemoryBackend) -> None:
        self._backend = backend

    async def occupy(self, account: str, item: Item, quota: Quota) -> QuotaExceeded | None:
        items = self._items(account)
        others = [each for each in items.values() if each.member != item.member]
        used, same = _used(others), sum(each.kind is item.kind for each in others)
        bound = full(quota, item, used, same)
        if bound is None:
            items[item.member] = item
            return None
        lapses = min((each.until_ms for each in items.values()), default=0)
        return QuotaExceeded(bound=bound, used=used, items=same, lapses_ms=lapses)

    async def resize(self, account: str, item: Item) -> None:
        items = self._items(account)
        if item.member in items:
            items[item.member] = item

    async def vacate(self, account: str, items: Iterable[tuple[ItemKind, str]]) -> None:
        self._backend.check()
        known = self._backend.accounts[account]
        for kind, name in items:
            known.pop(member_of(kind, name), None)

    async def used(self, account: str) -> Mapping[ItemKind, int]:
        self._backend.check()
        return _used(self._backend.accounts[account].values())

    def _items(self, account: str) -> dict[str, Item]:
        """The account's items that have not lapsed."""
        self._backend.check()
        items, now = self._backend.accounts[account], self._backend.clock() * 1000
        for member in [each for each, item in items.items() if item.until_ms <= now]:
            del items[member]
        return items


def _used(items: Iterable[Item]) -> dict[ItemKind, int]:
    used = dict.fromkeys(ItemKind, 0)
    for item in items:
        used[item.kind] += item.size
    return used
