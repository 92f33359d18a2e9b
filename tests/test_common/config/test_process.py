"""The errors of a process for settings that it cannot use."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from headrace_common.config import process
from headrace_common.config.process import read_settings, write_termination_message


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="TRIAL_", cli_kebab_case=True)

    seats: int = Field(1, ge=1)
    names: dict[str, str] = Field(default_factory=dict)
    log_level: str = "INFO"
    log_format: Literal["auto", "json", "text"] = "json"


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before
    logging.captureWarnings(False)


def test_good_settings_are_read() -> None:
    settings = read_settings(Settings, "trial", ["--seats", "3"])
    assert settings is not None and settings.seats == 3


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--seats", "0"], {}, "trial: seats: Input should be greater than or equal to 1"),
        (["--log-level", "LOUD"], {}, "trial: log level: must be one of DEBUG,"),
        ([], {"TRIAL_NAMES": "{"}, 'trial: error parsing value for field "names"'),
        (["--seat", "1"], {}, "trial: unrecognized arguments: --seat 1 (see `trial --help`)"),
    ],
)
def test_bad_settings_are_named(
    arguments: list[str],
    environment: dict[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert read_settings(Settings, "trial", arguments) is None
    assert capsys.readouterr().err.startswith(message)


def test_a_misspelt_variable_is_named_with_the_likely_spelling(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variable that Kubernetes sets for a Service called trial is not a setting."""
    for name in ("SEAT", "COLOUR", "SERVICE_HOST", "PORT_80_TCP_ADDR", "METRICS_URL"):
        monkeypatch.setenv(f"TRIAL_{name}", "1")
    monkeypatch.setenv("TRIAL_NAMES", "{}")

    assert read_settings(Settings, "trial", []) is not None

    warnings = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["variable"], line["meant"]) for line in warnings] == [
        ("TRIAL_COLOUR", None),
        ("TRIAL_SEAT", "TRIAL_SEATS"),
    ]
    assert {line["level"] for line in warnings} == {"WARNING"}


def test_the_termination_message_is_one_line_without_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "termination-log"
    monkeypatch.setattr(process, "TERMINATION_LOG", log)
    write_termination_message("backend_unfit", "outside of a pod there is no such file")
    assert not log.exists()
    log.touch()
    write_termination_message("backend_unfit", "redis://:hunter2@queue:6379\n  is too old")
    assert log.read_text() == "backend_unfit: redis://:[redacted]@queue:6379 is too old"


def test_invalid_settings_are_the_termination_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    monkeypatch.setattr(process, "TERMINATION_LOG", log)
    assert read_settings(Settings, "trial", ["--seats", "0"]) is None
    assert log.read_text().startswith("settings_invalid: seats: ")
