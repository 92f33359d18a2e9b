"""`headrace simulate` as a person types it: the command passes its options on to the simulator."""

import json
import subprocess
import sys
from pathlib import Path


def test_a_small_trace_gives_a_table_with_a_line_for_each_policy_and_files(tmp_path: Path) -> None:
    files = {"results": tmp_path / "results.json", "picture": tmp_path / "autoscaling.png"}
    given = (
        *("simulate", "--days", "0.01", "--policy", "peak", "--policy", "headrace"),
        *("--cold-start", "20", "--json", str(files["results"]), "--plot", str(files["picture"])),
    )
    done = subprocess.run(
        [sys.executable, "-m", "headrace_cli", *given], capture_output=True, text=True, timeout=60
    )

    title, head, *lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert "requests in 0.2 hours" in title
    assert {"policy", "SLO", "GPU-hours", "share"} <= set(head.split())
    assert [line.split("  ")[0].strip() for line in lines] == ["fixed peak", "Headrace"]
    assert all("%" in line for line in lines)
    for what, path in files.items():
        assert path.stat().st_size > 0
        assert f"{what}: {path}\n" in done.stderr
    results = json.loads(files["results"].read_text())
    assert results["inputs"]["profile"]["cold_start_seconds"] == 20.0
