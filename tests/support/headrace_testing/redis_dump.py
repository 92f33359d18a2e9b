"""All bytes in a Redis, and a search for prompts and answers in them."""

import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from headrace_common.protocol.redis.client.client import RedisClient
from headrace_common.wire.messages import pack_tokens

WINDOW = 6  # tokens in a row: fewer could occur by chance


@dataclass(frozen=True, slots=True)
class Dump:
    """Stored bytes by their places."""

    contents: Sequence[tuple[str, bytes]]

    def finds(self, content: str | Sequence[int]) -> list[str]:
        """The places of a text, or of a row of token ids."""
        wanted = forms(content)
        return [where for where, data in self.contents if any(form in data for form in wanted)]


def forms(content: str | Sequence[int], length: int = WINDOW) -> list[bytes]:
    """The encodings in which a text, or the first `length` token ids, could be stored."""
    if isinstance(content, str):
        return [content.encode(), repr(content)[1:-1].encode()]
    row = list(content[:length])
    packed = msgpack.packb(row)[1:]
    listed = re.sub(r"[\[\]]", "", str(row))
    wide = array("q", row).tobytes()
    return [pack_tokens(row), packed, wide, listed.encode(), listed.replace(" ", "").encode()]


async def dump(client: RedisClient) -> Dump:
    """Every key and value of a server."""
    names = await client.scan("*")
    return Dump([(name.decode(errors="replace"), await _value(client, name)) for name in names])


async def _value(client: RedisClient, name: bytes) -> bytes:
    kind = (await client.command("TYPE", name)).decode()
    command: dict[str, tuple[Any, ...]] = {
        "string": ("GET", name),
        "hash": ("HGETALL", name),
        "list": ("LRANGE", name, 0, -1),
        "set": ("SMEMBERS", name),
        "zset": ("ZRANGE", name, 0, -1),
        "stream": ("XRANGE", name, "-", "+"),
    }
    return b"\n".join([name, *_flat(await client.command(*command[kind]))])


def _flat(value: Any) -> Iterable[bytes]:
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _flat(pair)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _flat(item)
