"""Commands find a running `headrace up` through its data folder."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from headrace_cli.datadir import DataDir
from headrace_cli.errors import UsageError
from headrace_cli.flags.assignment import ProcessArguments
from headrace_cli.queues.queues import queue_url
from headrace_cli.running import (
    DATA_DIR,
    RunningProcess,
    RunningSystem,
    api_url,
    described,
    engine_url,
    find_running,
)
from headrace_cli.up.stack import UpConfig
from headrace_cli.up.up import program, welcome

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


def test_without_a_running_system_the_defaults_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_running(DATA_DIR) is None
    assert api_url(None, DATA_DIR) == "http://127.0.0.1:8000/v1"
    assert engine_url(None, DATA_DIR, None) is None
    assert queue_url(None, DATA_DIR) == "redis://127.0.0.1:6379/0"
    with pytest.raises(UsageError, match="no `headrace up` runs with"):
        engine_url(None, DATA_DIR, "engine-0")


def test_a_named_folder_with_which_nothing_runs_is_refused(tmp_path: Path) -> None:
    for find in (api_url, queue_url):
        assert find("http://other", tmp_path) == "http://other"
        with pytest.raises(UsageError, match=f"no `headrace up` serves with .* {tmp_path}"):
            find(None, tmp_path)
    assert engine_url("http://other", tmp_path, None) == "http://other"
    with pytest.raises(UsageError, match="no `headrace up` serves with"):
        engine_url(None, tmp_path, None)


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
    printed = welcome(UpConfig(), SYSTEM, ".venv/bin/headrace")
    assert "\n  .venv/bin/headrace chat\n" in printed
    assert "Open http://127.0.0.1:8000 in a browser" in printed
    assert "engine-1: http://e1/metrics, /debug/steps" in printed
    assert "gateway-0: http://g0/metrics" in printed
    assert "Authorization" not in printed

    keyed = replace(SYSTEM, api_keys=True)
    silent = UpConfig(arguments=ProcessArguments(console=False))
    printed = welcome(silent, keyed, "headrace")
    assert "browser" not in printed
    assert '-H "Authorization: Bearer $OPENAI_API_KEY"' in printed
    assert "headrace keys create" in printed


def test_the_command_is_printed_as_it_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "headrace"
    command.touch(mode=0o755)
    monkeypatch.setattr("sys.argv", [str(command), "up"])
    monkeypatch.setenv("PATH", "")
    assert program() == str(command)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == "headrace"
    for other in ("/absent/headrace", "/somewhere/headrace_cli/__main__.py"):
        monkeypatch.setattr("sys.argv", [other, "up"])
        assert program() == "headrace"
