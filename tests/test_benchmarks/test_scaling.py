"""Curves of cost: what their growth is called, and a small run."""

import json
import sys
from pathlib import Path

import pytest

import capacity
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
    for part in ("plans", "waiting", "engines", "frame"):
        given = ["--most", "2", "--seconds", "0.2", "--json", str(report), "--png", str(picture)]
        monkeypatch.setattr(sys, "argv", ["scaling.py", *given, "--only", part])
        scaling.main()
    curves = json.loads(report.read_text())["curves"]
    assert len(curves) == 9
    assert all(cost >= 0 for curve in curves for _, cost in curve["points"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 10 µs a token and 1 ms a request, 100 engines of 3,000 tokens/s take 4 cores of gateways.
    With 5 gateways each step has 5 frames, or rather 4.99 where streams are spread by chance. A
    frame costs 100 µs where there are 1,000 a second, and 50 µs at the largest load."""
    costs = {
        "gateway, 2,000 tokens/s": [(1, 10.0)],
        "gateway, by requests at once": [(1, 1000.0)],
        "queue, by waiting requests": [(1, 200.0)],
        "Redis, by frames": [(1000, 100.0), (10_000, 500.0)],
        "Redis, by engines": [(0, 0.0), (1000, 200.0)],
        "client's bytes": [(1, 200.0)],
    }
    curves = [Curve(name, "x", "y", "z", points=points).report() for name, points in costs.items()]
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"curves": curves}))
    given = ["--gpus", "100", "--streams", "30", "--speed", "100", "--busy", "0.8"]
    monkeypatch.setattr(sys, "argv", ["capacity.py", str(report), *given, "--output", "300"])
    capacity.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [[part.strip() for part in line.strip("│").split("│")] for line in lines if "│" in line]
    assert dict(rows) == {
        "tokens a second": "300,000",
        "requests a second": "1,000",
        "gateway processes": "5",
        "frames a second": "49,938",
        "Redis, cores": "2.7",
        "of them for frames": "92 %",
        "Redis masters": "4",
        "to clients, MB/s": "60",
    }
