"""An engine's status as bytes."""

import math
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any

import msgpack

from ..errors import MessageError
from ..wire.keys import MAX_SHARDS
from .base import EngineStatus

_FIELDS = {field.name: field.type for field in fields(EngineStatus)}
_KINDS: dict[Any, tuple[type, ...]] = {
    str: (str,),
    int: (int,),
    float: (float, int),
    bool: (bool,),
}
MAX_STATUS_BYTES = 4096
MAX_NAME_CHARS = 64
# Fields that engines of older versions do not send, with what is true of those engines.
_LATER = {
    "shards": 1,
    "name": "",
    "shows_batch": False,
    "sleep_level": 0,
    "time_to_turn": 0.0,
    "variant": "",
    "kv_role": "kv_both",
    "max_local_prefill_length": 0,
}


def encode_status(status: EngineStatus) -> bytes:
    """Packs a status as a map of its fields."""
    data: bytes = msgpack.packb(asdict(status))
    return data


# Gateways read the statuses of up to a thousand engines each second, most of them unchanged.
@lru_cache(maxsize=2048)
def decode_status(data: bytes) -> EngineStatus:
    """Unpacks and checks a status; unknown fields are ignored. Raises MessageError."""
    if len(data) > MAX_STATUS_BYTES:
        raise MessageError(f"engine status of {len(data)} bytes is over {MAX_STATUS_BYTES}")
    try:
        body = msgpack.unpackb(data, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MessageError(f"engine status: not msgpack: {error}") from error
    if not isinstance(body, dict):
        raise MessageError("engine status: must be a map")
    body = {**_LATER, **body}
    for name, kind in _FIELDS.items():
        if not isinstance(body.get(name), _KINDS[kind]):
            raise MessageError(f"engine status: {name} is missing or of another type")
    if not 0 < body["shards"] <= MAX_SHARDS:
        raise MessageError(f"engine status: shards must be 1 to {MAX_SHARDS}")
    if not 0 <= body["time_to_turn"] < math.inf:
        raise MessageError("engine status: time_to_turn must be 0 or more seconds")
    for name in ("name", "variant"):
        if len(body[name]) > MAX_NAME_CHARS:
            raise MessageError(f"engine status: {name} has over {MAX_NAME_CHARS} characters")
    return EngineStatus(**{name: body[name] for name in _FIELDS})
