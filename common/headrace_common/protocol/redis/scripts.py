"""Loads the Lua scripts in `lua/` and runs them with the retries that each one allows."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from redis.exceptions import NoScriptError

from .client.client import Argument, RedisClient

NAMES = (
    "admit",
    "take",
    "reap",
    "beat",
    "resume",
    "finish",
    "given",
    "cancel",
    "giveback",
    "giveout",
    "replay",
    "register",
    "unregister",
    "granted",
    "adapt",
    "load",
    "store",
    "unstore",
    "occupy",
    "vacate",
    "keepimage",
    "dropimage",
    "reserve",
    "settle",
    "renew",
    "probe",
    "tally",
    "share",
    "demand",
    "slot",
)
# Scripts that need further helpers before them.
_HELPERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("reserve", "settle"), ("usage",)),
    **dict.fromkeys(("occupy", "vacate"), ("account",)),
    **dict.fromkeys(("beat", "share"), ("charging",)),
    **dict.fromkeys(("keepimage", "dropimage"), ("images",)),
    "finish": ("charging", "ledger"),
    "given": ("ledger",),
    "reap": ("ledger", "adapters", "variants"),
    "replay": ("tenants", "joining"),
    "admit": ("tenants", "joining", "placed"),
    "cancel": ("tenants", "leaving", "placed", "ledger"),
    "take": (
        "charging",
        "tenants",
        "leaving",
        "placed",
        "precedence",
        "ledger",
        "adapters",
        "variants",
        "passing",
    ),
}


@dataclass(frozen=True, slots=True)
class Script:
    """One script's text for the present kind of server, and its SHA1."""

    text: bytes
    sha: str


def load_scripts(*, shebang: bool) -> dict[str, Script]:
    """Reads all scripts. `shebang` False leaves out the flags line, which Redis 6.2 cannot read."""
    folder = files(__package__) / "lua"
    shared = (folder / "shared.lua").read_text()

    def helpers(name: str) -> str:
        return shared + "".join(
            (folder / f"{more}.lua").read_text() for more in _HELPERS.get(name, ())
        )

    return {
        name: _script((folder / f"{name}.lua").read_text(), helpers(name), shebang)
        for name in NAMES
    }


def _script(body: str, shared: str, shebang: bool) -> Script:
    flags, _, rest = body.partition("\n")
    text = "\n".join([flags, shared, rest] if shebang else [shared, rest]).encode()
    return Script(text, hashlib.sha1(text, usedforsecurity=False).hexdigest())


class Scripts:
    """Runs scripts by their hash; sends them again to a server that has forgotten them."""

    def __init__(self, client: RedisClient, scripts: dict[str, Script]) -> None:
        self._client = client
        self._scripts = scripts

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        script = self._scripts[name]
        try:
            return await self._client.command("EVALSHA", script.sha, len(keys), *keys, *args)
        except NoScriptError:
            return await self._client.command("EVAL", script.text, len(keys), *keys, *args)

    async def run_many(
        self, name: str, calls: Sequence[tuple[Sequence[str], Sequence[Argument]]]
    ) -> list[Any]:
        """Runs several calls of an idempotent script in one round trip; raises the first error."""
        script = self._scripts[name]
        commands = [("EVALSHA", script.sha, len(keys), *keys, *args) for keys, args in calls]
        try:
            return await self._client.pipeline(commands)
        except NoScriptError:
            await self._client.each("SCRIPT LOAD", script.text)
            return await self._client.pipeline(commands)
