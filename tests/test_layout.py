"""Rules for the layout: the places of files, permitted imports, and documents that match the
code."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from headrace_testing.import_layers import MOST_SUBPACKAGES, contracts, subpackages_of
from headrace_testing.pages import architecture

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("cli", "common", "engine", "operator", "service")
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/development.md",
    "docs/architecture.md",
)
# Imports every module of a package while importing the named ones fails.
IMPORT_ALL = """
import importlib, pkgutil, sys
package, blocked = sys.argv[1], set(sys.argv[2].split(","))

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{name} is not allowed in {package}")

sys.meta_path.insert(0, Blocker())
top = importlib.import_module(package)
for module in pkgutil.walk_packages(top.__path__, package + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_a_source_root_is_not_a_package(root: str) -> None:
    """operator/__init__.py would hide the standard library's module."""
    assert not (ROOT / root / "__init__.py").exists()


def test_test_folders_are_not_packages() -> None:
    found = [path for path in (ROOT / "tests").rglob("__init__.py") if "support" not in path.parts]

    assert found == []


def test_the_wheel_holds_the_package_of_every_source_root(project: dict[str, Any]) -> None:
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages = [f"{root}/{path.parent.name}" for root in SOURCE_ROOTS for path in packages_of(root)]

    assert sorted(wheel["packages"]) == sorted(packages)
    assert sorted(wheel["dev-mode-dirs"]) == sorted(SOURCE_ROOTS)


def test_every_source_root_is_checked(project: dict[str, Any]) -> None:
    tools = project["tool"]

    assert set(SOURCE_ROOTS) <= set(tools["mypy"]["mypy_path"])
    assert set(SOURCE_ROOTS) <= set(tools["mypy"]["files"])
    assert set(SOURCE_ROOTS) <= set(tools["ruff"]["src"])
    packages = {
        path.parent.name for root in SOURCE_ROOTS for path in (ROOT / root).glob("*/__init__.py")
    }
    assert set(tools["importlinter"]["root_packages"]) == packages


@pytest.mark.parametrize(
    ("package", "blocked"),
    [
        ("headrace_common", "torch,transformers,fastapi,uvicorn,kopf,kubernetes"),
        ("headrace_gateway", "torch,transformers,kopf,kubernetes"),
        ("headrace_cli", "torch,transformers,fastapi,uvicorn,kopf,kubernetes"),
        ("headrace_operator", "torch,transformers,fastapi,uvicorn"),
    ],
)
def test_a_package_imports_without_what_is_not_its_own(package: str, blocked: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, package, blocked],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("extra", ["gateway", "operator"])
def test_an_image_without_torch_stays_without_it(extra: str) -> None:
    needed = closure("headrace", extra)

    assert "pydantic" in needed
    assert needed.isdisjoint({"torch", "transformers", "triton"})


def test_the_command_resolves() -> None:
    (command,) = (found for found in entry_points(group="console_scripts", name="headrace"))

    assert callable(command.load())


def test_every_pinned_version_is_exact() -> None:
    lines = (ROOT / "constraints.txt").read_text().split()

    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.+!]+", line)] == []


def test_every_documented_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name
        for document in DOCUMENTS
        for name in re.findall(r"\bmake ([a-z-]+)(?=[`\s]|$)", code(ROOT / document))
    }

    assert named
    assert named <= targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_of_a_document_leads_somewhere(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\(([^)#]+)[^)]*\)|src=\"([^\"]+)\"", path.read_text())
    local = [link for pair in links for link in pair if link and "://" not in link]

    assert local
    assert [link for link in local if not (path.parent / link).exists()] == []


def closure(package: str, extra: str = "") -> set[str]:
    """Every distribution that installing `package[extra]` here requires."""
    found: set[str] = set()
    open_ends = [(package, extra)]
    while open_ends:
        name, extras = open_ends.pop()
        for line in requires(name) or ():
            needed = Requirement(line)
            wanted = needed.marker is None or needed.marker.evaluate({"extra": extras})
            if wanted and needed.name not in found:
                found.add(needed.name)
                open_ends += [(needed.name, one) for one in (needed.extras or {""})]
    return found


def test_the_tables_of_the_architecture_are_those_of_the_source() -> None:
    text = architecture.PAGE.read_text()

    assert architecture.page(text) == text, "`make generated` writes it anew"


def test_a_request_passes_few_files() -> None:
    assert len(architecture.files(architecture.TO_THE_QUEUE)) <= 6
    assert len(architecture.files(architecture.FROM_THE_QUEUE)) <= 8


def test_the_breakpoints_of_the_walk_exist() -> None:
    text = (ROOT / "docs/development.md").read_text()
    modules = dict(
        (short, module) for module, short in re.findall(r"\b(headrace_[\w.]+) as (\w+)", text)
    )
    breakpoints = re.findall(r'"b (\w+)\.([\w.]+)', text)

    assert breakpoints
    for short, function in breakpoints:
        package, _, rest = modules[short].partition(".")
        file = f"{architecture.SOURCES[package]}/{package}/{rest.replace('.', '/')}.py"
        assert f".{function}" in dict(architecture.functions(file)), f"{short}.{function}"


def test_rooms_import_downward_only() -> None:
    counted = [(subpackages_of(package), layers) for package, layers in contracts()]

    assert {subpackages.package for subpackages, _ in counted} == {
        path.parent.name for root in SOURCE_ROOTS for path in packages_of(root)
    }
    assert [
        len(subpackages.imports)
        for subpackages, _ in counted
        if len(subpackages.imports) > MOST_SUBPACKAGES
    ] == []
    assert [edge for subpackages, layers in counted for edge in subpackages.upward(layers)] == []
    assert sum(subpackages.circles for subpackages, _ in counted) == 0


def packages_of(root: str) -> list[Path]:
    return sorted((ROOT / root).glob("*/__init__.py"))


def code(document: Path) -> str:
    """The code in a document, in blocks and inline."""
    text = document.read_text()
    blocks = re.findall(r"```.*?\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return "\n".join([*blocks, *inline])
