"""Log lines of child processes: formats, the file and its rotation."""

import json
from pathlib import Path

import pytest

from headrace_cli.processes.logs import MAX_LINE_BYTES, LineBuffer, LogFile, parse_line


def test_a_json_line_keeps_its_fields_and_is_shown_as_one_line() -> None:
    text = json.dumps(
        {
            "timestamp": "2026-01-01T00:00:00.000Z",
            "level": "ERROR",
            "logger": "headrace_engine",
            "message": "step failed",
            "request_id": "r1",
            "exception.message": "out of\nmemory",
        }
    )

    line = parse_line(text, "stderr")

    assert line.alarming
    assert line.summary == "step failed request_id=r1 exception.message=out of memory"
    assert line.fields == json.loads(text)


def test_a_cause_that_the_error_tells_is_not_repeated() -> None:
    fields = {"message": "cannot serve", "error": "no model: gone", "exception.message": "gone"}

    assert parse_line(json.dumps(fields), "stderr").summary == "cannot serve error=no model: gone"


def test_a_line_of_valkey_has_its_level() -> None:
    warned = parse_line("12:M 21 Nov 2026 01:29:17.402 # Can't save: disk full", "stdout")
    line = parse_line("12:M 21 Nov 2026 01:29:17.402 * Ready to accept connections", "stdout")

    assert (warned.level, warned.summary) == ("WARNING", "Can't save: disk full")
    assert warned.alarming
    assert not line.alarming


@pytest.mark.parametrize(
    "text", ["Traceback (most recent call last):", "{not json", "[1]", '{"a":1}']
)
def test_other_text_is_wrapped_and_raises_no_alarm(text: str) -> None:
    line = parse_line(text, "stderr")

    assert not line.alarming
    assert line.fields["message"] == text
    assert line.fields["stream"] == "stderr"


def test_a_log_file_is_rotated_at_its_limit(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs" / "engine-0.log", max_bytes=400)

    for number in range(8):
        log.write(parse_line(f"line {number}", "stdout"))
    log.close()

    kept = [log.path.with_name("engine-0.log.1"), log.path]
    lines = [json.loads(line) for path in kept for line in path.read_text().splitlines()]
    assert [line["message"] for line in lines][-1] == "line 7"
    assert all(path.stat().st_size <= 400 for path in kept)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_reported_once_and_loses_only_lines(tmp_path: Path) -> None:
    path = tmp_path / "engine-0.log"
    path.symlink_to("/dev/full")
    log = LogFile(path)

    first, *others = [log.write(parse_line(f"line {number}", "stdout")) for number in range(3)]
    log.close()

    assert first is not None and "engine-0.log: No space left" in first
    assert others == [None, None]


def test_a_deleted_log_file_is_created_again(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs" / "engine-0.log", max_bytes=200)
    log.write(parse_line("before", "stdout"))
    log.path.unlink()
    reports = [log.write(parse_line(f"line {number}", "stdout")) for number in range(8)]
    log.close()

    assert reports == [None] * 8
    assert "line 7" in log.path.read_text()


def test_bytes_are_cut_into_lines_wherever_they_are_split() -> None:
    data = "eins\nzwölf\r\n\nrest".encode()
    buffer = LineBuffer()

    lines = [line for byte in data for line in buffer.feed(bytes([byte]))]

    assert lines == ["eins", "zwölf"]
    assert buffer.flush() == ["rest"]
    assert buffer.flush() == []


def test_an_endless_line_takes_bounded_memory() -> None:
    buffer = LineBuffer()

    lines = [line for _ in range(4) for line in buffer.feed(b"x" * MAX_LINE_BYTES)]

    assert lines
    assert all(len(line) <= MAX_LINE_BYTES for line in lines)
