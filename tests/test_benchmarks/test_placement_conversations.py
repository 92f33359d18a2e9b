"""The benchmark of conversations on few requests: what following all blocks saves."""

import json
from pathlib import Path

import pytest

import placement_conversations
from placement_conversations import METHODS, Scene, compare, random_prompts

SCENE = Scene(engines=4, slots=8, systems=8, requests=240, cached=32_768, load=0.7)


def test_conversations_compute_less_again_where_all_their_blocks_are_followed() -> None:
    figures = compare(SCENE)
    shared, first, every = (figures[name]["again"] for name in METHODS)
    assert every < 0.75 * first < 0.75 * shared
    assert figures[METHODS[2]]["wait_ms_p99"] <= 100


def test_prompts_that_share_nothing_wait_no_longer() -> None:
    figures = compare(random_prompts(SCENE))
    first, every = (figures[name] for name in METHODS[1:])
    assert first == every and first["again"] == 0


def test_the_figures_are_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, options = (
        tmp_path / "figures.json",
        ["--engines", "2", "--requests", "24", "--cost", "--rounds", "1"],
    )
    placement_conversations.main([*options, "--load", "0.5", "--json", str(file)])
    written = json.loads(file.read_text())
    assert set(written["random 0.5"]) == set(METHODS)
    assert set(written["random placing seconds"]) == set(METHODS[1:])
    assert "again" in capsys.readouterr().out
