"""Today's code reads recorded messages of earlier releases, and those releases read today's
messages."""

import json
import math
from pathlib import Path

import msgpack
import pytest

from headrace_common.errors import MessageError
from headrace_common.protocol.frames import decode_control, decode_frame
from headrace_testing.wire_messages import ID, MESSAGES

RELEASES = sorted(Path(__file__).parent.glob("wire_*.json"))
RECORDED = [
    pytest.param(name, bytes.fromhex(data), id=f"{release.stem}-{name}")
    for release in RELEASES
    for name, data in json.loads(release.read_text()).items()
]


@pytest.mark.parametrize(("name", "data"), RECORDED)
def test_messages_of_an_earlier_release_are_read(name: str, data: bytes) -> None:
    assert MESSAGES[name].decode(data) == MESSAGES[name].content


@pytest.mark.parametrize(("name", "data"), RECORDED)
def test_messages_contain_all_fields_that_an_earlier_release_reads(name: str, data: bytes) -> None:
    """Each element and field that the release wrote still exists, in its place and with its
    value."""
    now = MESSAGES[name].encode(MESSAGES[name].content)
    assert_holds(
        msgpack.unpackb(now, strict_map_key=False), msgpack.unpackb(data, strict_map_key=False)
    )


@pytest.mark.parametrize("name", MESSAGES)
def test_each_message_is_read_as_it_was_written(name: str) -> None:
    message = MESSAGES[name]
    assert message.decode(message.encode(message.content)) == message.content


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, "1"])
def test_a_request_without_a_valid_weight_is_refused(weight: object) -> None:
    message = MESSAGES["request of a weighted tenant"]
    body = msgpack.unpackb(message.encode(message.content))
    with pytest.raises(MessageError, match="weight"):
        message.decode(msgpack.packb({**body, "weight": weight}))


def assert_holds(now: object, before: object) -> None:
    if isinstance(before, dict) and isinstance(now, dict):
        for key, value in before.items():
            assert_holds(now[key], value)
    elif isinstance(before, list) and isinstance(now, list):
        assert len(now) >= len(before)
        for item, value in zip(now, before, strict=False):
            assert_holds(item, value)
    else:
        assert now == before


def test_elements_after_the_known_ones_are_ignored() -> None:
    cancel = msgpack.packb([1, 10, ID, "of a later release"])
    assert decode_control(cancel) == MESSAGES["cancel"].content
    frame = msgpack.unpackb(MESSAGES["frame"].encode(MESSAGES["frame"].content))
    assert decode_frame(msgpack.packb([*frame, "of a later release"])) == MESSAGES["frame"].content


def test_a_control_message_of_a_later_release_is_refused_alone() -> None:
    with pytest.raises(MessageError, match="unknown kind"):
        decode_control(msgpack.packb([1, 99, ID]))
