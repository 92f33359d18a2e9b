"""Attempts of an engine to use other models' data in Redis: every command of the server on every
key of the protocol."""

from collections.abc import Iterator
from typing import Any

from headrace_common.protocol.redis.client.client import Command
from headrace_common.protocol.redis.users import KEYS, KeyRule, KeyScope
from headrace_common.wire import keys
from headrace_common.wire.keys import ShardKeys

# Commands whose keys have no fixed position.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "eval": ("return 1", "1", "KEY"),
    "eval_ro": ("return 1", "1", "KEY"),
    "evalsha": ("0" * 40, "1", "KEY"),
    "evalsha_ro": ("0" * 40, "1", "KEY"),
    "fcall": ("f", "1", "KEY"),
    "fcall_ro": ("f", "1", "KEY"),
    "lmpop": ("1", "KEY", "LEFT"),
    "zmpop": ("1", "KEY", "MIN"),
    "blmpop": ("0", "1", "KEY", "LEFT"),
    "bzmpop": ("0", "1", "KEY", "MIN"),
    "sintercard": ("1", "KEY"),
    "zintercard": ("1", "KEY"),
    "zunion": ("1", "KEY"),
    "zinter": ("1", "KEY"),
    "zdiff": ("1", "KEY"),
    "xread": ("STREAMS", "KEY", "0"),
    "xreadgroup": ("GROUP", "e", "x", "STREAMS", "KEY", ">"),
    "migrate": ("127.0.0.1", "1", "KEY", "0", "1"),
}


def names_of(rule: KeyRule, name: str) -> Iterator[str]:
    """The keys for one row of the table: those of another model, and those without a model."""
    if rule.place in (KeyScope.SHARD, KeyScope.IN_SHARD):
        rest = ":x" if rule.place is KeyScope.IN_SHARD else ""
        yield from (f"{rule.prefix}:{ShardKeys(name, n).tag}{rest}" for n in (0, 1, 47))
    elif rule.prefix in ("o", "gw"):
        stem = f"{rule.prefix}:{{g.{keys.new_incarnation('host.1')}}}"
        yield from (stem, f"{stem}:{keys.frames('', name).rpartition(':')[2]}")
    elif rule.prefix == "c":
        yield from (keys.shared_controls("e"), keys.controls("e", name))
    elif rule.place is KeyScope.GRANTED:
        _, _, granted = keys.granted_model(name).partition(":")
        yield f"{rule.prefix}:{granted}"
    elif rule.place is not KeyScope.READ:
        yield f"{rule.prefix}:{rule.pattern.replace('*', '{x}' if rule.pattern == '*' else 'x')}"


def commands(client: Any) -> list[tuple[str, ...]]:
    """All commands of the server of a redis.Redis that take a key, with KEY in its place and enough
    other words."""
    client.response_callbacks.clear()
    known: Any = client.execute_command("COMMAND")
    found: list[tuple[str, ...]] = []
    for each in _flat(known):
        name, arity, at = each[0].decode(), each[1], each[3]
        if name in ELSEWHERE:
            found.append((name, *ELSEWHERE[name]))
        elif at > 0:
            words = name.split("|")
            rest = ["1"] * max(abs(arity) - len(words), at - len(words) + 1)
            found.append((*words, *rest[: at - len(words)], "KEY", *rest[at - len(words) + 1 :]))
    return found


def _flat(found: Any) -> Iterator[Any]:
    for each in found:
        yield each
        if len(each) > 9:
            yield from _flat(each[9])


def all_tries(commands_: list[tuple[str, ...]], names: list[str]) -> list[Command]:
    return [
        tuple(name if word == "KEY" else word for word in command)
        for name in names
        for command in commands_
    ]


def keys_of(name: str) -> list[str]:
    """Keys of a model, of gateways and of tenants: one of each kind in the table."""
    return [key for rule in KEYS for key in names_of(rule, name)]
