"""The placement benchmark on few requests: what placement gains, and what it may cost."""

import json
from pathlib import Path

import pytest

import placement
from placement import METHODS, Scene, compare

SCENE = Scene(engines=4, slots=8, prefixes=40, cached=12, zipf=0.6, requests=500, load=0.6)


def test_placement_finds_cached_prompts_without_delaying_requests() -> None:
    figures = compare(SCENE)
    shared, strict, both = (figures[METHODS[index].name] for index in (0, 1, 4))
    assert both["hit_rate"] > shared["hit_rate"] + 0.2
    assert both["wait_ms_p99"] <= 100 < shared["wait_ms_p99"]
    assert strict["wait_ms_p99"] > 10 * both["wait_ms_p99"]
    assert compare(SCENE, METHODS[4:]) == {METHODS[4].name: both}


def test_the_figures_are_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    placement.main(["--requests", "50", "--load", "0.5", "--json", str(file)])
    assert set(json.loads(file.read_text())["0.5"]) == {method.name for method in METHODS}
    assert "hit rate" in capsys.readouterr().out
