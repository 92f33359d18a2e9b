"""The stored bytes of tenants are counted and limited, on both backends."""

import random
import time
from collections.abc import Mapping

import pytest

from headrace_common.protocol.accounts import Bound, Item, ItemKind, Quota, QuotaExceeded
from headrace_testing.backends import Backend, InMemory, OverRedis

NONE = dict.fromkeys(ItemKind, 0)
LATER = int((time.time() + 600) * 1000)


def item(name: str, size: int, kind: ItemKind = ItemKind.FILE, seconds: float = 600.0) -> Item:
    return Item(kind, name, size, int((time.time() + seconds) * 1000))


def only(**used: int) -> Mapping[ItemKind, int]:
    return NONE | {ItemKind[kind.upper()]: size for kind, size in used.items()}


async def test_an_account_never_exceeds_its_limit(backend: Backend) -> None:
    one, other = backend.accounts(), backend.accounts()
    most = Quota(max_bytes=100)
    first = item("a", 60)

    assert await one.occupy("t", first, most) is None
    refused = await other.occupy("t", item("b", 41, ItemKind.REQUEST), most)
    assert await other.occupy("another", item("b", 41), most) is None
    # stored again: it replaces the earlier item
    assert await other.occupy("t", item("a", 70), most) is None
    assert await other.occupy("t", item("b", 31), most) is not None
    await one.vacate("t", [(ItemKind.FILE, "a"), (ItemKind.FILE, "x"), (ItemKind.REQUEST, "a")])
    await one.vacate("t", [(ItemKind.FILE, "a")])
    assert await other.occupy("t", item("b", 100), most) is None

    assert refused == QuotaExceeded(
        bound=Bound.BYTES, used=only(file=60), items=0, lapses_ms=first.until_ms
    )
    assert await one.used("t") == only(file=100)


async def test_each_kind_has_its_own_bounds(backend: Backend) -> None:
    accounts = backend.accounts()
    most = Quota(max_bytes=1000, kind_bytes=100, kind_items=2)
    assert await accounts.occupy("t", item("a", 40), most) is None
    assert await accounts.occupy("t", item("a", 900, ItemKind.BATCH), Quota()) is None

    bytes_full = await accounts.occupy("t", item("b", 60), most)
    assert await accounts.occupy("t", item("b", 10), most) is None
    items_full = await accounts.occupy("t", item("c", 10), most)
    kind_full = await accounts.occupy("t", item("b", 61), Quota(kind_bytes=100))

    assert bytes_full is None
    assert kind_full is not None and kind_full.bound is Bound.KIND_BYTES
    assert items_full is not None
    assert (items_full.bound, items_full.items) == (Bound.KIND_ITEMS, 2)
    assert await accounts.used("t") == only(file=50, batch=900)


async def test_expired_items_do_not_count(backend: Backend) -> None:
    accounts = backend.accounts()
    for number in range(3):
        assert await accounts.occupy("t", item(str(number), 30, seconds=-1), Quota()) is None
    assert await accounts.occupy("t", item("x", 100), Quota(max_bytes=100, kind_items=1)) is None


async def test_only_counted_items_can_be_resized(backend: Backend) -> None:
    accounts = backend.accounts()
    await accounts.occupy("t", item("a", 90), Quota())
    await accounts.resize("t", item("a", 30))
    await accounts.resize("t", item("b", 30))
    assert await accounts.used("t") == only(file=30)


@pytest.mark.parametrize("seed", range(3))
async def test_both_backends_count_the_same(backend: Backend, seed: int) -> None:
    """They agree for any operations in any order.

    If only memory is available, both backends are the same.
    """
    assert isinstance(backend, (InMemory, OverRedis))
    chance = random.Random(seed)
    pair = (backend.accounts(), InMemory().accounts())
    for _ in range(80):
        kind, name = chance.choice(list(ItemKind)), chance.choice("abc")
        size, most = chance.randrange(100), chance.randrange(300)
        until = chance.choice((1, LATER))
        quota = Quota(
            max_bytes=chance.choice((None, most)),
            kind_bytes=chance.choice((None, most // 2)),
            kind_items=chance.choice((None, 2)),
        )
        match chance.randrange(4):
            case 0 | 1:
                found = [
                    await each.occupy("t", Item(kind, name, size, until), quota) for each in pair
                ]
                assert found[0] == found[1]
            case 2:
                for each in pair:
                    await each.resize("t", Item(kind, name, size, until))
            case 3:
                for each in pair:
                    await each.vacate("t", [(kind, name)])
