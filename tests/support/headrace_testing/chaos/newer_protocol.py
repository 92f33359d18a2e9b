"""The protocol's next version, for rolling updates: requests with a version and a field that
today's engines do not know, and frames with one more element.

Its engines read requests of both versions and write frames that all gateways can read, because
engines are updated before gateways.
"""

from typing import Any

import msgpack

from headrace_common.protocol.frames import encode_frame
from headrace_common.protocol.redis import engine as redis_engine
from headrace_common.protocol.redis import gateway as redis_gateway
from headrace_common.wire.messages import (
    PROTOCOL_VERSION,
    REQUEST_VERSION,
    Frame,
    GenerateRequest,
    decode_request,
    encode_request,
)

NEXT = REQUEST_VERSION + 1


def _newer_request(request: GenerateRequest) -> bytes:
    body = msgpack.unpackb(encode_request(request))
    return _packed({**body, "v": NEXT, "of the next version": {"since": NEXT}})


def _either_request(data: bytes) -> GenerateRequest:
    body = msgpack.unpackb(data)
    assert body["v"] in (PROTOCOL_VERSION, NEXT)
    return decode_request(_packed({**body, "v": PROTOCOL_VERSION}))


def _longer_frame(frame: Frame) -> bytes:
    return _packed([*msgpack.unpackb(encode_frame(frame)), {"since": NEXT}])


def _packed(body: object) -> bytes:
    packed: bytes = msgpack.packb(body)
    return packed


def _replace(module: Any, **new: object) -> None:
    """Sets names of a module to new values."""
    assert set(new) <= set(vars(module))
    vars(module).update(new)


def install() -> None:
    """Makes this process, a gateway or an engine, speak the next version from now on."""
    _replace(redis_gateway, version_of=lambda _request: NEXT, encode_request=_newer_request)
    _replace(
        redis_engine,
        REQUEST_VERSION=NEXT,
        decode_request=_either_request,
        encode_frame=_longer_frame,
    )
