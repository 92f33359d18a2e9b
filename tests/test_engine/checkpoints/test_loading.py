"""The progress that a user sees during a long load, and the bytes that are read ahead."""

import logging
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrace_engine.checkpoints.loading import FileRange, LoadProgress, ReadAhead, data_ranges
from headrace_engine.checkpoints.tensor_files import WHOLE, TensorFiles
from headrace_testing.checkpoints import save_checkpoint
from headrace_testing.engines import make_runner


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_progress_is_a_line_every_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO), LoadProgress(False, clock) as progress:
        progress.begin(1000)
        for second in range(25):
            clock.now = float(second)
            progress.advance(40)
    shares = [vars(record).get("share") for record in caplog.records]
    assert shares == [0.44, 0.84, None]
    assert vars(caplog.records[-1])["bytes"] == 1000 and vars(caplog.records[-1])["seconds"] == 24.0


def test_on_a_terminal_progress_is_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with LoadProgress(True) as progress:
        progress.begin(4000)
        progress.advance(4000)
    assert "Loading weights: 100%" in capsys.readouterr().err


def test_a_failed_load_is_not_reported_as_done(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(KeyError), LoadProgress(False) as progress:
        progress.begin(10)
        raise KeyError
    assert not caplog.records


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no posix_fadvise")
def test_bytes_are_read_ahead_of_their_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _, start, length, advice: advised.append((start, length))
    )
    file = tmp_path / "weights"
    file.write_bytes(bytes(100))
    ahead = ReadAhead([FileRange(file, at, at + 10) for at in range(0, 100, 10)], ahead=25)
    assert advised == [(0, 10), (10, 10), (20, 10)]
    ahead.advance(10)
    assert advised[3:] == [(30, 10)]
    ahead.advance(90)
    assert len(advised) == 10


def test_data_ranges_match_the_stored_tensors(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(4), "b": torch.full((2, 3), 7.0)}, file)
    found = data_ranges(file)["b"]
    stored = file.read_bytes()[found.start : found.stop]
    assert stored == torch.full((2, 3), 7.0).numpy().tobytes()


def test_every_byte_is_counted_once(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4), "b": torch.zeros(6)}, tmp_path / "model.safetensors")
    progress = LoadProgress(False)
    files = TensorFiles(tmp_path, progress)
    files.plan({"b": WHOLE, "a": WHOLE})
    for name in ("b", "b", "a"):
        files.load(name)
    assert (progress.done, progress.total) == (40, 40)


@pytest.mark.parametrize("name", ["phi3", "gemma2"])
def test_a_load_counts_all_its_weights(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_checkpoint(tmp_path, name)
    with caplog.at_level(logging.INFO):
        make_runner(folder)
    sizes = [record for record in caplog.records if record.getMessage() == "weights loaded"]
    header = sum(each.stop - each.start for each in data_ranges(_weights(folder)).values())
    assert vars(sizes[0])["bytes"] == header


def _weights(folder: Path) -> Path:
    return folder / "model.safetensors"
