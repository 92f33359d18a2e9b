"""The slots of a Redis Cluster: the slot of a command, and the node of a slot."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from redis.crc import key_slot

from .client import Argument
from .endpoint import Address

# Commands without a key that this project uses; in all others the key comes first.
_KEYLESS = frozenset(
    ("ACL", "CLIENT", "CLUSTER", "COMMAND", "CONFIG", "DBSIZE", "ECHO", "FLUSHALL", "INFO", "KEYS")
    + ("PING", "ROLE", "SCAN", "SCRIPT", "TIME")
)
_SCRIPTS = frozenset({"EVAL", "EVALSHA"})
_STREAM_READS = frozenset({"XREAD", "XREADGROUP"})


def slot_of(args: Sequence[Argument]) -> int | None:
    """The slot of a command's first key; None if it has no key. The server checks other keys."""
    position = _first_key(args)
    return None if position is None else key_slot(_bytes(args[position]))


def _first_key(args: Sequence[Argument]) -> int | None:
    name = str(args[0]).upper().split(" ")[0]
    if name in _KEYLESS:
        return None
    if name in _SCRIPTS:
        return 3 if int(args[2]) else None
    if name in _STREAM_READS:
        return args.index("STREAMS") + 1
    return 1


def _bytes(key: Argument) -> bytes:
    return key if isinstance(key, bytes) else str(key).encode()


class SlotMap:
    """The masters by slot as one node reported them, corrected by later redirections."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ranges: list[tuple[int, Address]] = []
        self._moved: dict[int, Address] = {}

    def load(self, reply: Sequence[Any], asked: Address) -> None:
        """Reads the reply of CLUSTER SLOTS.

        A node that omits its own host is the one that was `asked`.
        """
        ranges = sorted((int(first), int(last), master) for first, last, master, *_ in reply)
        self._firsts = [first for first, _, _ in ranges]
        self._ranges = [(last, _address(master, asked)) for _, last, master in ranges]
        self._moved = {}

    def move(self, slot: int, address: Address) -> None:
        self._moved[slot] = address

    def master(self, slot: int) -> Address | None:
        """The master of a slot; None if no node has the slot."""
        if slot in self._moved:
            return self._moved[slot]
        index = bisect_right(self._firsts, slot) - 1
        if index < 0 or slot > self._ranges[index][0]:
            return None
        return self._ranges[index][1]

    @property
    def masters(self) -> tuple[Address, ...]:
        found = [address for _, address in self._ranges]
        return tuple(dict.fromkeys([*found, *self._moved.values()]))


def _address(node: Sequence[Any], asked: Address) -> Address:
    host = node[0].decode() if node[0] else ""
    return (host if host not in ("", "?") else asked[0]), int(node[1])
