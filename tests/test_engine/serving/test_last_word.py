"""The last line that an engine writes if it cannot start, for the status of its pod."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_common.config import process
from headrace_engine.__main__ import main


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before
    logging.captureWarnings(False)


def test_a_wrong_path_is_reported_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    monkeypatch.setattr(process, "TERMINATION_LOG", log)
    assert main(["--model", f"{tmp_path}/absent"]) == process.EXIT_CONFIG
    assert log.read_text() == f"model_not_found: {tmp_path}/absent: no such folder or GGUF file"
