"""Runs the first steps of a newcomer: a clone, the README's first command and first examples, with
empty caches. The clone contains what is committed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_testing.processes import until
from headrace_testing.readme import ROOT, block, first_command

LIMIT_S = 1800
SERVED = "is served at http://127.0.0.1:8000/v1"
# Variables that another run of Python, make or Headrace has set in our environment.
FOREIGN = ("ARGS", "PYTHON", "PYTEST", "COVERAGE", "VIRTUAL_ENV", "MAKE", "MFLAGS", "HEADRACE",
           "REDIS_URL", "UV_CACHE_DIR", "PIP_CACHE_DIR")  # fmt: skip


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment that this process was started with, without caches."""
    pairs = Path("/proc/self/environ").read_text().rstrip("\0").split("\0")
    found = dict(pair.split("=", 1) for pair in pairs)
    kept = {name: value for name, value in found.items() if not name.startswith(FOREIGN)}
    return {**kept, "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """The folder for the clone, into which gigabytes are installed."""
    yield tmp_path / "headrace"

    def removed() -> bool:
        shutil.rmtree(tmp_path, ignore_errors=True)
        return not tmp_path.exists()

    # `make up` compiles packages beside the server, and notices late that this has ended.
    until(removed, "the clone to be removed")


@pytest.mark.bare
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_readme_leads_from_a_clone_to_a_streamed_answer(
    clone: Path, environment: dict[str, str]
) -> None:
    began = time.monotonic()

    def passed(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)  # noqa: T201

    def typed(command: str, stdin: str = "") -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=clone, env=environment, input=stdin, text=True,
            stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        passed(command.strip().splitlines()[0])
        return done.stdout

    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    passed("git clone")
    command = first_command()
    serving = subprocess.Popen(
        ["bash", "-c", command], cwd=clone, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert serving.stdout is not None
        assert any(SERVED in line for line in serving.stdout), "it ended"
        passed(command)
        streamed = typed(block("sh", "Last-Event-ID"))
        answer = json.loads(typed(block("sh", "What is Headrace?")))
        chat = typed(block("sh", "headrace chat"), stdin="Hello!\n")
    finally:
        os.killpg(serving.pid, signal.SIGINT)
        serving.communicate()
    passed("Ctrl-C")

    assert streamed.rstrip().endswith("data: [DONE]")
    assert answer["choices"][0]["message"]["content"]
    assert len(chat.split()) >= 3
