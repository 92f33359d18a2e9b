"""Accounts of what tenants store, over Redis. Every call may be repeated."""

from collections.abc import Iterable, Mapping

from ...wire import keys
from ..accounts import Bound, Item, ItemKind, Quota, QuotaExceeded, member_of
from .client.connection import Connection

TRIES = 3
KINDS = tuple(ItemKind)
ANY = Quota()
# The limit that a request exceeded, by the number of OCCUPY's argument.
_BOUNDS = {5: Bound.BYTES, 6: Bound.KIND_BYTES, 7: Bound.KIND_ITEMS}


class RedisAccounts:
    """See Accounts."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def occupy(self, account: str, item: Item, quota: Quota) -> QuotaExceeded | None:
        return await self._occupy(account, item, quota, known="")

    async def resize(self, account: str, item: Item) -> None:
        await self._occupy(account, item, ANY, known="1")

    async def _occupy(
        self, account: str, item: Item, quota: Quota, *, known: str
    ) -> QuotaExceeded | None:
        bounds = (quota.max_bytes, quota.kind_bytes, quota.kind_items)
        arguments = [item.member, item.size, item.until_ms, known]
        arguments += ["" if bound is None else bound for bound in bounds]
        reply = await self._connection.run(
            "occupy", _keys(account), [*arguments, *KINDS], tries=TRIES
        )
        if reply[0] == 0:
            return None
        number, items, lapses_ms, *used = reply
        return QuotaExceeded(
            bound=_BOUNDS[number],
            used=dict(zip(KINDS, used, strict=True)),
            items=items,
            lapses_ms=lapses_ms,
        )

    async def vacate(self, account: str, items: Iterable[tuple[ItemKind, str]]) -> None:
        members = [member_of(kind, name) for kind, name in items]
        await self._connection.run("vacate", _keys(account), members, tries=TRIES)

    async def used(self, account: str) -> Mapping[ItemKind, int]:
        _, sizes = _keys(account)
        commands = [("ZSCORE", sizes, kind) for kind in KINDS]
        found = await self._connection.attempt(
            lambda: self._connection.client.pipeline(commands), tries=TRIES
        )
        return {kind: int(size or 0) for kind, size in zip(KINDS, found, strict=True)}


def _keys(account: str) -> list[str]:
    return [keys.account_items(account), keys.account_sizes(account)]
