"""What tenants leave in the store, counted in one account for each of them, and its bounds.

Everything that a client can leave is an item of a kind, with its bytes and when it lapses. An
account forgets what has lapsed. Implemented over Redis and, with the same contract tests, in
memory.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Kind(StrEnum):
    """What an item is. A LINE is a batch's request while it runs; its result is the BATCH's."""

    REQUEST = "request"
    EMBEDDINGS = "embeddings"
    LINE = "line"
    FILE = "file"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Item:
    """Something that is left until `until_ms` (Unix ms). `name` is unique in its kind."""

    kind: Kind
    name: str
    size: int
    until_ms: int

    @property
    def member(self) -> str:
        return member_of(self.kind, self.name)


def member_of(kind: Kind, name: str) -> str:
    """The name of an item in its account."""
    return f"{kind}:{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The most bytes of an account, and bytes and items of one kind in it. None: any number."""

    max_bytes: int | None = None
    kind_bytes: int | None = None
    kind_items: int | None = None


class Bound(StrEnum):
    """A part of a quota, by its field."""

    BYTES = "max_bytes"
    KIND_BYTES = "kind_bytes"
    KIND_ITEMS = "kind_items"


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """Why an item is not counted. `used` are the bytes of the account's other items by kind.

    `items`: how many others of its kind there are. `lapses_ms`: when the first one lapses (Unix
    ms), 0 where there is none.
    """

    bound: Bound
    used: Mapping[Kind, int]
    items: int
    lapses_ms: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a store's memory. `most` 0: there is no limit."""

    used: int
    most: int

    @property
    def share(self) -> float:
        """The used part, from 0."""
        return self.used / self.most if self.most else 0.0


class Accounts(Protocol):
    """Raises BackendUnavailable where Redis cannot be reached."""

    async def occupy(self, account: str, item: Item, quota: Quota) -> Full | None:
        """Counts an item, or again with another size. None where it is counted."""

    async def resize(self, account: str, item: Item) -> None:
        """Counts an item with another size, if it is counted."""

    async def vacate(self, account: str, items: Iterable[tuple[Kind, str]]) -> None:
        """Counts items no longer, by kind and name."""

    async def used(self, account: str) -> Mapping[Kind, int]:
        """The bytes by kind; what has lapsed counts until the next item is counted."""


def full(quota: Quota, item: Item, used: Mapping[Kind, int], items: int) -> Bound | None:
    """The bound over which an item would bring an account that has all this beside it."""
    if _over(quota.max_bytes, sum(used.values()) + item.size):
        return Bound.BYTES
    if _over(quota.kind_bytes, used[item.kind] + item.size):
        return Bound.KIND_BYTES
    return Bound.KIND_ITEMS if _over(quota.kind_items, items + 1) else None


def _over(most: int | None, number: int) -> bool:
    return most is not None and number > most
