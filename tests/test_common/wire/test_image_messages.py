"""Requests with images on the wire."""

from dataclasses import replace
from typing import Any

import msgpack
import pytest

from headrace_common.errors import MessageError
from headrace_common.protocol.prefix_routing import prefix_key
from headrace_common.protocol.requests import fingerprint
from headrace_common.wire.images import ImageData, ImageSpan, content_hash, image_digest
from headrace_common.wire.messages import (
    GenerateRequest,
    decode_request,
    encode_request,
    version_of,
)
from headrace_testing.backends import make_request

DIGEST = image_digest(b"a cat", b"salt")


def about(start: int = 1, digest: bytes = DIGEST, **fields: Any) -> GenerateRequest:
    data = ImageData(b"a cat", content_hash(b"a cat"))
    image = ImageSpan(digest=digest, start=start, length=2, grid=(1, 2, 4), data=data)
    return replace(make_request(prompt=(5, 9, 9, 6, 9, 9)), images=(image,), **fields)


def test_images_travel_apart_from_their_request() -> None:
    request = about()
    written = encode_request(request)
    (read,) = decode_request(written).images

    assert read == request.images[0] and read.data is None
    assert b"a cat" not in written
    assert (read.start, read.end, read.grid) == (1, 3, (1, 2, 4))


def test_only_requests_with_images_need_an_engine_that_reads_them() -> None:
    assert version_of(make_request()) == 1
    assert version_of(about()) == 3


@pytest.mark.parametrize(
    "images",
    [
        "cat",
        [[DIGEST, 1, 2, 1, 2]],
        [[b"short", 1, 2, 1, 2, 4]],
        [["x" * 32, 1, 2, 1, 2, 4]],
        [[DIGEST, 1, 2, 1, 2, True]],
        [[DIGEST, 1, 2, 1, 0, 4]],
        [[DIGEST, 1, 2, 1, 2**20, 4]],
        [[DIGEST, -1, 2, 1, 2, 4]],
        [[DIGEST, 1, 0, 1, 2, 4]],
        [[DIGEST, 5, 2, 1, 2, 4]],
        [[DIGEST, 3, 2, 1, 2, 4], [DIGEST, 1, 2, 1, 2, 4]],
        [[DIGEST, 1, 2, 1, 2, 4], [DIGEST, 2, 2, 1, 2, 4]],
        [[DIGEST, 0, 1, 1, 1, 1]] * 1025,
    ],
)
def test_malformed_images_are_refused(images: object) -> None:
    body = msgpack.unpackb(encode_request(about()))

    with pytest.raises(MessageError, match="images"):
        decode_request(msgpack.packb({**body, "images": images}))


def test_other_images_make_another_request() -> None:
    other = image_digest(b"a dog", b"salt")

    assert fingerprint(about()) == fingerprint(about(request_id=about().request_id))
    assert fingerprint(about()) != fingerprint(about(digest=other))


def test_prefixes_with_other_images_go_to_other_engines() -> None:
    other = image_digest(b"a dog", b"salt")

    assert prefix_key(about(), 4) == prefix_key(about(), 4)
    assert prefix_key(about(), 4) != prefix_key(about(digest=other), 4)
    assert prefix_key(about(start=4), 4) == prefix_key(about(start=4, digest=other), 4)
