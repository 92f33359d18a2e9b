"""Adapters change under load, while one engine is killed and another one starts."""

from pathlib import Path

from headrace_testing.adapter_rounds import AdapterRounds, make_scene
from headrace_testing.processes import Starter

ROUNDS = 9


def test_adapters_change_under_load_without_a_refused_or_wrong_answer(
    checkpoint: Path, tmp_path: Path, start: Starter
) -> None:
    """The command `python -m headrace_testing.adapter_rounds` runs more rounds."""
    run = AdapterRounds(make_scene(checkpoint, tmp_path), tmp_path, start)
    try:
        run.start()
        figures = run.run(ROUNDS)
    finally:
        run.close()

    assert (figures.refused, figures.wrong) == ([], [])
    assert figures.rounds == ROUNDS
    assert figures.adapted > ROUNDS
