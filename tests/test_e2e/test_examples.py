"""Every program of examples/ runs as its README says: with `headrace up`, or without a server."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from headrace_testing.headrace_up import UpProcess
from headrace_testing.needs import missing

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = {"langchain_chat": "langchain_openai", "litellm_chat": "litellm"}
TIMEOUT_S = 180
# What is printed at temperature 0, or whatever the tokens are.
PRINTED = {
    "openai_chat": "tokens",
    "structured_output": "left=",
    "resume_stream": "|",
    "anthropic_messages": "",
    "langchain_chat": "['",
    "litellm_chat": "",
    "batch": "sum-7 7 + 1 = 8.",
    "offline": "1 + 2 = 3.",
}


def run(name: str, up: UpProcess) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        env=os.environ | {"OPENAI_BASE_URL": f"{up.url}/v1", "OPENAI_API_KEY": "none"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", PRINTED)
def test_the_example_runs(name: str, served: UpProcess) -> None:
    package = PACKAGES.get(name)
    if package is not None and find_spec(package) is None:
        missing(f"no {package}")

    printed = run(name, served)

    assert printed.strip()
    assert PRINTED[name] in printed


def test_every_example_is_run_and_listed() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    listed = (EXAMPLES / "README.md").read_text()

    assert names == set(PRINTED)
    assert [name for name in names if f"({name}.py)" not in listed] == []
