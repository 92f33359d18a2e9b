"""The encoding of the records of files and batches."""

import pytest

from headrace_common.errors import MessageError
from headrace_common.protocol.batches import (
    BatchProgress,
    BatchRequest,
    BatchStatus,
    StoredFile,
    decode_record,
    encode_record,
)

FILE = StoredFile(
    id="file-1",
    tenant="t",
    filename="in.jsonl",
    purpose="batch",
    bytes=10,
    chunks=1,
    created_at=1,
    expires_at=2,
    models=("m",),
)
REQUEST = BatchRequest(
    id="batch-1",
    tenant="t",
    key_id="",
    endpoint="/v1/completions",
    input_file_id="file-1",
    completion_window="24h",
    created_at=1,
    expires_at=2,
    output_ttl=3,
    kept_until=4,
    metadata={"a": "b"},
)
PROGRESS = BatchProgress(
    status=BatchStatus.FAILED, total=3, models=("m",), errors=({"line": 1, "param": None},)
)


@pytest.mark.parametrize("record", [FILE, REQUEST, PROGRESS], ids=lambda one: type(one).__name__)
def test_a_record_is_read_as_it_was_written(
    record: StoredFile | BatchRequest | BatchProgress,
) -> None:
    assert decode_record(type(record), encode_record(record)) == record


def test_unknown_fields_are_ignored_and_absent_fields_have_defaults() -> None:
    assert decode_record(BatchProgress, b'{"of_a_later_version": 1}') == BatchProgress()


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"{", "record: Invalid JSON"),
        (b"[]", "record"),
        (b'{"status": "odd"}', "status"),
        (b'{"total": true}', "total"),
        (b'{"total": "1"}', "total"),
        (b'{"models": [1]}', "models.0"),
        (b'{"errors": ["a"]}', "errors.0"),
    ],
)
def test_a_record_with_a_wrong_value_is_refused_by_its_field(data: bytes, field: str) -> None:
    with pytest.raises(MessageError, match=f"BatchProgress: {field}"):
        decode_record(BatchProgress, data)


def test_the_message_does_not_quote_the_record() -> None:
    with pytest.raises(MessageError) as refused:
        decode_record(BatchRequest, b'{"id": "private"}')

    assert "private" not in str(refused.value)
