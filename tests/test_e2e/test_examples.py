"""Every program in examples/ runs as its README says, with `headrace up` or without a server."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from headrace_common.text.checkpoint import DEMO_EMBEDDINGS
from headrace_testing.headrace_up import UpProcess
from headrace_testing.in_process import program
from headrace_testing.needs import missing

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = {"langchain_chat": "langchain_openai", "litellm_chat": "litellm"}
# These import what no other test in this process needs, or leave connections open.
OWN_PROCESS = {*PACKAGES, "anthropic_messages", "resume_stream"}
TIMEOUT_S = 180
# The output at temperature 0, or output that does not depend on the tokens.
PRINTED = {
    "openai_chat": "tokens",
    "structured_output": "left=3 sign='+' right=4",
    "resume_stream": "|",
    "anthropic_messages": "",
    "langchain_chat": "['",
    "litellm_chat": "",
    "agent": "What is 123 * 45? 123 * 45 = 5535.",
    "rag": "Where does Anna live? [Anna lives in Lisbon.] Anna lives in Lisbon.",
    "batch": "sum-7 7 + 1 = 8.",
    "offline": "1 + 2 = 3.",
}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    folder = tmp_path_factory.mktemp("embedder")
    with UpProcess(folder, "--model", DEMO_EMBEDDINGS) as up:
        up.until_served(DEMO_EMBEDDINGS)
        yield up


def run(name: str, **servers: UpProcess) -> str:
    urls = {f"{server}_BASE_URL": f"{up.url}/v1" for server, up in servers.items()}
    file, env = EXAMPLES / f"{name}.py", os.environ | {"OPENAI_API_KEY": "none"} | urls
    if name not in OWN_PROCESS:
        return program(file, env)
    done = subprocess.run(
        [sys.executable, str(file)],
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", PRINTED)
def test_the_example_runs(name: str, served: UpProcess, request: pytest.FixtureRequest) -> None:
    package = PACKAGES.get(name)
    if package is not None and find_spec(package) is None:
        missing(f"no {package}")

    servers = {"OPENAI": served}
    if "EMBEDDINGS_BASE_URL" in (EXAMPLES / f"{name}.py").read_text():
        servers["EMBEDDINGS"] = request.getfixturevalue("embedder")
    printed = run(name, **servers)

    assert printed.strip()
    assert PRINTED[name] in printed


@pytest.mark.parametrize("notebook", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_notebook_runs_and_is_kept_without_outputs(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [
        cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    file = tmp_path / "notebook.py"
    file.write_text("\n".join("".join(cell["source"]) for cell in cells))
    monkeypatch.chdir(EXAMPLES)

    assert "continuous, chunked prefill" in program(file, os.environ | {"MPLBACKEND": "agg"})
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


def test_every_example_is_run_and_listed() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    listed = (EXAMPLES / "README.md").read_text()

    assert names == set(PRINTED)
    assert [name for name in files if f"({name})" not in listed] == []
