"""`headrace demo` as a person starts it."""

import json
import os
import subprocess
from pathlib import Path

import psutil

from headrace_testing.headrace_up import HEADRACE


def test_the_demo_kills_an_engine_and_loses_nothing(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path), "HEADRACE_GATEWAY_API_KEYS_FILE": "/absent"}
    done = subprocess.run(
        [str(HEADRACE), "demo", "--fast", "--json"],
        capture_output=True,
        text=True,
        timeout=280,
        env=env,
    )

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["same"] is True
    texts = [[answer["text"] for answer in result[run]] for run in ("undisturbed", "disturbed")]
    assert texts[0] == texts[1] and all(texts[0])
    assert "SIGKILL" in done.stderr and "identical" in done.stderr
    assert not psutil.pid_exists(result["killed_pid"])
    assert list(tmp_path.iterdir()) == []
    assert not _of_the_demo(str(tmp_path))


def _of_the_demo(folder: str) -> list[psutil.Process]:
    """The processes that a demo with this folder has left."""
    found = []
    for process in psutil.process_iter():
        try:
            if folder in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found
