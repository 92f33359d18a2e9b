"""The permissions of all Redis users: their keys and their commands.

Gateways, engines and the operator have one user each; an engine may instead have a user that is
limited to one model. Redis refuses everything else.
"""

from dataclasses import dataclass
from enum import Enum
from urllib.parse import quote

GATEWAY, ENGINE, OPERATOR = ROLES = ("gateway", "engine", "operator")
USER = "headrace-"


class KeyScope(Enum):
    """Where a key's name contains its model."""

    SHARD = "{t}"  # the rest of the name is the tag of one of its shards
    IN_SHARD = "{t}:*"
    OF_GATEWAY = "{g.*}:{}"  # the name ends with the model
    OF_ENGINE = "{e.*}:{}"
    GRANTED = "{m}:{}"
    READ = "{sc}"  # a model's user may only read it
    OF_GROUP = "{s.}"  # of engines that share an accelerator, whatever their models are
    NOWHERE = "*"  # a model's user may not touch it


@dataclass(frozen=True, slots=True)
class KeyRule:
    """Keys with one prefix, and the roles that may touch `pattern`.

    `read_only`: a model's user may only read them, as those with the scope READ.
    """

    prefix: str
    place: KeyScope
    roles: tuple[str, ...]
    pattern: str = "*"
    read_only: bool = False

    def of_role(self) -> str:
        return f"{self.prefix}:{self.pattern}"

    def of_model(self, model: str) -> list[str]:
        """Rules of ACL SETUSER for a user of one model."""
        read = self.read_only or self.place is KeyScope.READ  # a rule that Redis knows since 7.0
        return [f"{'%R' if read else ''}~{pattern}" for pattern in self._patterns(model)]

    def of_group(self, group: str) -> str:
        """The rule for a user whose engines are in a group."""
        return f"~{self.prefix}:{{s.{quote(group, safe='-_.~/')}}}"

    def _patterns(self, model: str) -> list[str]:
        name = quote(model, safe="-_.~/")  # as in keys: no special character of patterns is left
        if self.place in (KeyScope.NOWHERE, KeyScope.OF_GROUP):
            return []
        if self.place in (KeyScope.SHARD, KeyScope.IN_SHARD):
            rest = ":*" if self.place is KeyScope.IN_SHARD else ""
            tags = (f"{name}.0", f"{name}.[0-9]:*", f"{name}.[0-9][0-9]:*")
            return [f"{self.prefix}:{{{tag}}}{rest}" for tag in tags]
        return [f"{self.prefix}:{self.place.value.replace('{}', name)}"]


_QUEUE = (GATEWAY, ENGINE)
_ALL = ROLES
_STORE = (GATEWAY,)
KEYS = (
    *(KeyRule(prefix, KeyScope.IN_SHARD, _QUEUE) for prefix in ("q", "r", "p", "j")),
    KeyRule("im", KeyScope.IN_SHARD, _QUEUE, read_only=True),
    *(KeyRule(prefix, KeyScope.NOWHERE, _STORE) for prefix in ("ir", "it")),
    *(KeyRule(prefix, KeyScope.SHARD, _QUEUE) for prefix in ("s", "vc", "tw")),
    *(KeyRule(prefix, KeyScope.IN_SHARD, _QUEUE) for prefix in ("vt", "tq", "pl")),
    *(KeyRule(prefix, KeyScope.SHARD, _QUEUE) for prefix in ("w", "dl", "ul")),
    KeyRule("eng", KeyScope.SHARD, _ALL),
    KeyRule("es", KeyScope.IN_SHARD, _ALL),
    KeyRule("en", KeyScope.SHARD, _ALL),
    KeyRule("ep", KeyScope.IN_SHARD, _ALL),
    KeyRule("ls", KeyScope.IN_SHARD, _QUEUE),
    KeyRule("kv", KeyScope.IN_SHARD, _QUEUE),
    KeyRule("ar", KeyScope.IN_SHARD, _ALL),
    KeyRule("cy", KeyScope.SHARD, _ALL),
    KeyRule("cc", KeyScope.NOWHERE, _STORE),
    KeyRule("sd", KeyScope.NOWHERE, (GATEWAY, OPERATOR)),
    KeyRule("o", KeyScope.OF_GATEWAY, _QUEUE),
    KeyRule("gw", KeyScope.OF_GATEWAY, _QUEUE),
    KeyRule("c", KeyScope.OF_ENGINE, _ALL),
    KeyRule("m", KeyScope.NOWHERE, _ALL, "{m}"),
    KeyRule("mf", KeyScope.NOWHERE, _ALL, "{m}:*"),
    KeyRule("mg", KeyScope.NOWHERE, (GATEWAY, OPERATOR), "{m}"),
    KeyRule("me", KeyScope.GRANTED, (GATEWAY, OPERATOR), "{m}:*"),
    KeyRule("av", KeyScope.NOWHERE, _ALL, "{m}"),
    KeyRule("as", KeyScope.GRANTED, _ALL, "{m}:*", read_only=True),
    KeyRule("sl", KeyScope.OF_GROUP, (ENGINE,)),
    KeyRule("ml", KeyScope.NOWHERE, _STORE, "{m}:*"),
    *(KeyRule(prefix, KeyScope.NOWHERE, _STORE) for prefix in ("rq", "rw", "ra")),
    KeyRule("rk", KeyScope.NOWHERE, _STORE, "{rk}"),
    *(KeyRule(prefix, KeyScope.NOWHERE, _STORE) for prefix in ("kb", "kz", "ku", "kl", "fi", "ft")),
    *(
        KeyRule(prefix, KeyScope.NOWHERE, _STORE)
        for prefix in ("ba", "br", "bm", "bu", "bs", "bl", "bt")
    ),
    KeyRule("sc", KeyScope.READ, _QUEUE, "{sc}"),
    KeyRule("bo", KeyScope.NOWHERE, _STORE, "{bo}"),
    KeyRule("lr", KeyScope.NOWHERE, _STORE),
    KeyRule("lw", KeyScope.NOWHERE, _STORE, "{lw}"),
    KeyRule("gr", KeyScope.NOWHERE, _STORE),
)

_EVERYBODY = (
    "ping select client|setname info time role cluster|slots asking evalsha eval script|load"
)
_IN_QUEUES = (
    "xgroup xadd xreadgroup xclaim xpending xinfo xrange xack xdel hset hincrby hmget pexpire "
    "pexpireat del set get xread xrevrange"
)
COMMANDS = {
    GATEWAY: f"{_EVERYBODY} {_IN_QUEUES} xlen hget hgetall hsetnx hstrlen exists pttl "
    "srandmember getrange srem zadd zcard zrem zrange zscore zremrangebyscore rpush lpop lrem "
    "lpos lindex llen zincrby strlen",
    ENGINE: f"{_EVERYBODY} {_IN_QUEUES} hget hgetall hsetnx exists sadd srem zadd zrange zrem "
    "zscore rpush lpop lrem lpos lindex lrange zincrby srandmember getrange",
    OPERATOR: f"{_EVERYBODY} hget hgetall hdel hset hsetnx hstrlen exists del get set srandmember "
    "getrange srem xadd pexpire",
}


def role_rules(role: str) -> list[str]:
    """The permissions of a role's user, as rules of ACL SETUSER."""
    patterns = [f"~{keys.of_role()}" for keys in KEYS if role in keys.roles]
    return [*patterns, *_commands(role)]


def model_rules(model: str, group: str | None = None) -> list[str]:
    """The permissions of a user for engines of one model, which share an accelerator with those of
    the `group`."""
    patterns = [pattern for keys in KEYS for pattern in keys.of_model(model)]
    if group is not None:
        shared = [keys for keys in KEYS if keys.place is KeyScope.OF_GROUP]
        patterns += [keys.of_group(group) for keys in shared]
    return [*patterns, *_commands(ENGINE)]


def model_user(model: str) -> str:
    """The name of the user for engines of one model."""
    return f"{USER}{ENGINE}.{quote(model, safe='-_.~/')}"


def role_line(role: str) -> str:
    """A role's user as a line of an ACL file, without a password."""
    return " ".join(["user", USER + role, "on", *role_rules(role)])


def model_line(model: str, group: str | None = None) -> str:
    """A model's user as a line of an ACL file, without a password."""
    return " ".join(["user", model_user(model), "on", *model_rules(model, group)])


def _commands(role: str) -> list[str]:
    return [f"+{command}" for command in COMMANDS[role].split()]
