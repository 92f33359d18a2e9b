"""The benchmark of the request path on a few tokens: its figures, and that nothing is lost on the
way."""

import json
from pathlib import Path

import pytest

import path
from queue_path.streams import Started


@pytest.mark.parametrize("sealed", [[], ["--sealed"]])
def test_a_small_run_loses_nothing_and_writes_its_figures(
    tmp_path: Path, sealed: list[str]
) -> None:
    report = tmp_path / "report.json"
    path.main(
        ["--streams", "3", "--rate", "300", "--seconds", "0.1", "--only", "streams", "shard"]
        + ["--shard-requests", "20", "--processes", "1", "--json", str(report), *sealed]
    )
    results = json.loads(report.read_text())
    assert list(results) == ["3 streams", "shard"]
    streams = results["3 streams"]
    assert (streams["missed_tokens"], streams["incomplete_streams"]) == (0, 0)
    assert streams["hop_ms_p50"] > 0
    assert results["shard"]["redis_us_per_request"] > 0


def test_the_start_is_reported_once_after_all_processes_started() -> None:
    reports: list[str] = []
    started = Started(2, lambda: reports.append("all"))
    started()
    assert reports == []
    started()
    started()
    assert reports == ["all"]
