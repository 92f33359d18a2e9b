"""Every block of README and docs is run or checked: commands have the flags that they are given,
requests fit the API, files exist, objects fit their schema, and Python runs with the demo model.

Blocks that need a cluster, other tools or a model from the hub are checked as far as they can be.
"""

import json
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from headrace_cli.commands.up_command import process_words
from headrace_cli.main import app
from headrace_common.text.checkpoint import demo_folder
from headrace_engine import LLM
from headrace_gateway.http.app import AppDependencies, create_app
from headrace_gateway.models.models import Models
from headrace_gateway.settings import GatewaySettings
from headrace_operator.simulation.__main__ import app as simulation
from headrace_operator.spec.model_service import ModelService
from headrace_testing.adapters import save_adapter
from headrace_testing.documents import ROOT, Block, Command, blocks, commands

# docs/cli.md is generated, and its examples are parsed by its own test.
BLOCKS = [block for block in blocks() if block.page.name != "cli.md"]
# Programs and files that no checkout has: a cluster, the programs of Redis, Docker and the system.
ELSEWHERE = frozenset(
    "k rc kubectl helm docker openssl grep tail head echo export date pip vllm for do done } "
    "k() rc() -sN -n .ci/release".split()
)
# Python blocks that other tests of this file run.
RUN_BY = {
    "README.md": "tests/test_e2e/test_readme.py",
    "policies.md": "tests/test_engine/scheduler/test_policies_page.py",
    "structured-outputs.md": "tests/test_e2e/test_structured_outputs.py",
    "coming-from-openai.md": "tests/test_e2e/test_readme.py",
}
# Pages whose indented blocks are Python, or formats of bytes.
NOT_SHELL = re.compile(r"^(client\.|anthropic\.|file = |LLM\(|\[1, engine|c1 48)")
HUB = re.compile(r"\"[A-Z][\w.-]+/[\w.-]+\"")


def shell() -> list[Command]:
    found = {
        str(command): command
        for block in BLOCKS
        if block.language in ("", "sh") and not NOT_SHELL.match(block.text)
        for line in block.text.replace("\\\n", " ").splitlines()
        if not NOT_SHELL.match(line)
        for command in commands(Block(block.page, block.language, line))
    }
    return [command for command in found.values() if command.words[0] not in ELSEWHERE]


def headrace(words: tuple[str, ...]) -> None:
    """Parses a command line of `headrace`, without running it."""
    group: Any = get_command(app)
    name, *rest = words
    while hasattr(group.commands[name], "commands"):
        group = group.commands[name]
        name, *rest = rest
    if name in ("engine", "gateway"):
        process_words(name, rest)
        return
    command = get_command(simulation) if name == "simulate" else group.commands[name]
    command.make_context(name, list(rest))


def python(words: tuple[str, ...]) -> None:
    """Checks a Python file or module of the repository, which must know the flags."""
    first, *rest = words
    while first == "-c":
        compile(rest[0].removeprefix("b ") if rest[0].startswith("import") else "", "-c", "exec")
        first, *rest = rest[1:]
    if first != "-m":
        known_to(ROOT / first, rest)
    elif rest[0] == "pdb":
        python(tuple(rest[1:]))
    elif rest[0] in ("headrace_engine", "headrace_gateway"):
        process_words(rest[0].removeprefix("headrace_"), rest[1:])
    elif rest[0] not in ("pip", "pytest"):
        found = find_spec(rest[0])
        assert found is not None, rest[0]
        if found.submodule_search_locations is not None:
            found = find_spec(f"{rest[0]}.__main__")
            assert found is not None, rest[0]
        assert found.origin is not None
        known_to(ROOT / found.origin, rest[1:])


def known_to(file: Path, words: list[str]) -> None:
    """Whether the flags are in the program, in a program that it runs, or in a package beside
    it."""
    programs = [file, *(ROOT / word for word in words if word.endswith(".py"))]
    packages = [
        part
        for folder in (file.parent, *(each for each in file.parent.iterdir() if each.is_dir()))
        for part in folder.glob("*.py")
    ]
    if file.is_relative_to(ROOT / "tests"):
        packages += (ROOT / "tests" / "support").rglob("*.py")
    text = "".join(path.read_text() for path in (*programs, *packages))
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert [flag for flag in flags if f'"{flag}"' not in text] == []


def make(words: tuple[str, ...]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in words if "=" not in word} <= targets


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    unused: Any = None
    deps = AppDependencies(served=Models({}), client=unused, queue=unused)
    return create_app(GatewaySettings(), deps).openapi()


def curl(words: tuple[str, ...], document: Mapping[str, Any]) -> None:
    """Checks a request to the API or the metrics port: its path, and the fields of its body."""
    (url,) = [word for word in words if re.match(r"http|localhost|\.\.\.|\$\{INGRESS", word)]
    path = re.sub(r"^.*?(?=/(v1|health|metrics)\b)", "", url)
    path = re.sub(r"\$\{last[^}]*\}", "{request_id}", path)
    if path == "/metrics":
        return
    operations = document["paths"][path]
    data = [after for word, after in zip(words, words[1:], strict=False) if word == "-d"]
    if not data:
        assert "get" in operations
        return
    (media,) = operations["post"]["requestBody"]["content"].values()
    name = media["schema"]["$ref"].rpartition("/")[2]
    fields = json.loads(re.sub(r'(?<!")\.\.\.(?!")', '"..."', data[0])).keys()
    assert fields <= document["components"]["schemas"][name]["properties"].keys()


CHECKS: Mapping[str, Callable[[tuple[str, ...]], None]] = {
    "headrace": headrace,
    ".venv/bin/headrace": headrace,
    "python": python,
    ".venv/bin/python": python,
    "make": make,
}


@pytest.mark.parametrize("command", shell(), ids=str)
def test_a_documented_command_exists(command: Command, document: Mapping[str, Any]) -> None:
    name, *words = command.words
    if name == "curl":
        curl(tuple(words), document)
    else:
        CHECKS[name](tuple(words))


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "yaml"], ids=lambda b: b.page.name
)
def test_an_object_fits_its_schema(block: Block) -> None:
    found = yaml.safe_load(block.text.replace("<commit>", "abc"))
    whole: dict[str, Any] = {
        "spec": {"model": {"local": {"path": "headrace-demo"}}},
        "metadata": {"name": "m"},
    }
    whole = {**whole, **found}
    ModelService.parse({**whole, "metadata": {**whole["metadata"], "namespace": "n"}})


PYTHON = [block for block in BLOCKS if block.language == "python" and block.page.name not in RUN_BY]


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.page.name)
def test_a_program_runs_with_the_demo_model(block: Block, tmp_path: Path) -> None:
    """With an adapter of the demo model if the program names one."""
    code = HUB.sub('"headrace-demo"', block.text)
    if "/adapters/sql" in code:
        adapter = save_adapter(tmp_path, demo_folder())
        code = code.replace("/adapters/sql", str(adapter))
    names: dict[str, Any] = {}
    exec(code, names)
    assert any(isinstance(value, LLM) for value in names.values())


@pytest.mark.parametrize("page", RUN_BY)
def test_the_other_programs_are_run_by_their_tests(page: str) -> None:
    assert page in (ROOT / RUN_BY[page]).read_text() or page == "README.md"
