"""Curves of cost: what their growth is called, and a small run."""

import json
import sys
from pathlib import Path

import pytest

import scaling
from growth.curve import Curve, up_to


@pytest.mark.parametrize(
    ("costs", "exponent", "verdict"),
    [
        ([5.0, 5.0, 5.1], 0.01, "constant"),
        ([1.0, 4.0, 16.0], 1.0, "linear or better"),
        ([1.0, 1.0, 16.0], 2.0, "worse than linear"),
    ],
)
def test_growth(costs: list[float], exponent: float, verdict: str) -> None:
    curve = Curve("c", "x", "y", "ms", points=list(zip((1, 4, 16), costs, strict=True)))
    assert curve.exponent == pytest.approx(exponent, abs=0.01)
    assert curve.verdict == verdict


def test_sizes_are_bounded() -> None:
    assert up_to(50, [1, 10, 100]) == [1, 10]
    assert up_to(1, [1024, 4096]) == [1024]


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, picture = tmp_path / "report.json", tmp_path / "curves.png"
    for part in ("plans", "waiting", "engines"):
        given = ["--most", "2", "--seconds", "0.2", "--json", str(report), "--png", str(picture)]
        monkeypatch.setattr(sys, "argv", ["scaling.py", *given, "--only", part])
        scaling.main()
    curves = json.loads(report.read_text())["curves"]
    assert len(curves) == 7
    assert all(cost >= 0 for curve in curves for _, cost in curve["points"])
    assert picture.read_bytes().startswith(b"\x89PNG")
