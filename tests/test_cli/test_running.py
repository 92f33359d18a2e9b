"""Commands find a running `headrace up` through its data folder."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from headrace_cli.datadir import DataDir
from headrace_cli.errors import UsageError
from headrace_cli.queues.queues import queue_url
from headrace_cli.running import (
    RunningProcess,
    RunningSystem,
    api_url,
    described,
    engine_url,
    find_running,
)
from headrace_cli.up.stack import UpConfig
from headrace_cli.up.up import welcome

SYSTEM = RunningSystem(
    pid=7,
    url="http://127.0.0.1:8123",
    model="tiny",
    api_keys=False,
    redis="unix:///q",
    engines=(RunningProcess("engine-0", "http://e0"), RunningProcess("engine-1", "http://e1")),
    gateways=(RunningProcess("gateway-0", "http://g0"),),
)


def test_commands_find_what_runs_with_the_folder(tmp_path: Path) -> None:
    with DataDir(tmp_path) as data, described(SYSTEM, data):
        assert find_running(tmp_path) == SYSTEM
        assert (tmp_path / "running.json").stat().st_mode & 0o777 == 0o600
        assert api_url(None, tmp_path) == "http://127.0.0.1:8123/v1"
        assert api_url("http://other/v1", tmp_path) == "http://other/v1"
        assert queue_url(None, tmp_path) == "unix:///q"
        assert engine_url(None, tmp_path, None) == "http://e0"
        assert engine_url(None, tmp_path, "engine-1") == "http://e1"
        assert engine_url("http://other", tmp_path, None) == "http://other"
        with pytest.raises(UsageError, match="'engine-2': there is engine-0, engine-1"):
            engine_url(None, tmp_path, "engine-2")

    assert not (tmp_path / "running.json").exists()


def test_without_a_running_system_the_defaults_are_used(tmp_path: Path) -> None:
    assert find_running(tmp_path) is None
    assert api_url(None, tmp_path) == "http://127.0.0.1:8000/v1"
    assert engine_url(None, tmp_path, None) is None
    with pytest.raises(UsageError, match="no `headrace up` runs with"):
        engine_url(None, tmp_path, "engine-0")


def test_the_file_of_a_killed_up_counts_as_absent(tmp_path: Path) -> None:
    with DataDir(tmp_path) as data, described(SYSTEM, data):
        written = (tmp_path / "running.json").read_text()
    (tmp_path / "running.json").write_text(written)

    assert find_running(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}', '{"version": 1, "pid": 3}'])
def test_an_unreadable_file_counts_as_absent(tmp_path: Path, text: str) -> None:
    with DataDir(tmp_path):
        (tmp_path / "running.json").write_text(text)
        assert find_running(tmp_path) is None


def test_the_file_has_a_version_and_is_removed_even_after_an_error(tmp_path: Path) -> None:
    with suppress(RuntimeError), DataDir(tmp_path) as data, described(SYSTEM, data):
        assert json.loads((tmp_path / "running.json").read_text())["version"] == 1
        raise RuntimeError

    assert not (tmp_path / "running.json").exists()


def test_the_printed_text_has_the_ports_and_explains_keys() -> None:
    printed = welcome(UpConfig(), SYSTEM)
    assert "engine-1: http://e1/metrics, /debug/steps" in printed
    assert "gateway-0: http://g0/metrics" in printed
    assert "Authorization" not in printed

    keyed = replace(SYSTEM, api_keys=True)
    printed = welcome(UpConfig(), keyed)
    assert '-H "Authorization: Bearer $OPENAI_API_KEY"' in printed
    assert "headrace keys create" in printed
