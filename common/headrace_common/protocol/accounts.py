"""Accounts of what each tenant stores in Redis, and their quotas.

Everything that a client can store is an item: a kind, a size in bytes and a time at which it
expires. An account drops expired items. Implemented over Redis and, with the same contract tests,
in memory.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class ItemKind(StrEnum):
    """The kind of an item. A LINE is a batch's request while it runs; its result counts as
    BATCH."""

    REQUEST = "request"
    EMBEDDINGS = "embeddings"
    LINE = "line"
    FILE = "file"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Item:
    """Something stored until `until_ms` (Unix ms). `name` is unique within its kind."""

    kind: ItemKind
    name: str
    size: int
    until_ms: int

    @property
    def member(self) -> str:
        return member_of(self.kind, self.name)


def member_of(kind: ItemKind, name: str) -> str:
    """The name of an item within its account."""
    return f"{kind}:{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The bounds of an account: all bytes, and bytes and items of one kind. None: no bound."""

    max_bytes: int | None = None
    kind_bytes: int | None = None
    kind_items: int | None = None


class Bound(StrEnum):
    """The field of a Quota that would be exceeded."""

    BYTES = "max_bytes"
    KIND_BYTES = "kind_bytes"
    KIND_ITEMS = "kind_items"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaExceeded:
    """Why an item is refused.

    `used` is the bytes of the account's other items by kind, `items` the number of others of its
    kind, and `lapses_ms` the time at which the first of them expires (Unix ms; 0 if there is none).
    """

    bound: Bound
    used: Mapping[ItemKind, int]
    items: int
    lapses_ms: int


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """Memory of the store in bytes. `most` 0 means no limit."""

    used: int
    most: int

    @property
    def share(self) -> float:
        """The used fraction; 0 without a limit."""
        return self.used / self.most if self.most else 0.0


class Accounts(Protocol):
    """The accounts of all tenants. Raises BackendUnavailable if Redis cannot be reached."""

    async def occupy(self, account: str, item: Item, quota: Quota) -> QuotaExceeded | None:
        """Counts an item, or changes the size of a counted one. None if that is within `quota`."""

    async def resize(self, account: str, item: Item) -> None:
        """Changes the size of an item, if it is counted."""

    async def vacate(self, account: str, items: Iterable[tuple[ItemKind, str]]) -> None:
        """Removes items by kind and name."""

    async def used(self, account: str) -> Mapping[ItemKind, int]:
        """The bytes by kind; expired items count until the next item is counted."""


def full(quota: Quota, item: Item, used: Mapping[ItemKind, int], items: int) -> Bound | None:
    """The bound that `item` would exceed, given `used` bytes and `items` other items of its
    kind."""
    if _over(quota.max_bytes, sum(used.values()) + item.size):
        return Bound.BYTES
    if _over(quota.kind_bytes, used[item.kind] + item.size):
        return Bound.KIND_BYTES
    return Bound.KIND_ITEMS if _over(quota.kind_items, items + 1) else None


def _over(most: int | None, number: int) -> bool:
    return most is not None and number > most
