"""Counts the imports between the subpackages of each package: `make check` prints it.

    python -m headrace_testing.import_layers

A subpackage is a folder or module at the top of a package. Its layer is the line of the package's
import contract in pyproject.toml, which import-linter checks too.
"""

import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[3]
MOST_SUBPACKAGES = 25


@dataclass(frozen=True, slots=True)
class Subpackages:
    """The subpackages of a package, and the subpackages that each of them imports."""

    package: str
    imports: dict[str, frozenset[str]]

    @property
    def circles(self) -> int:
        """1 if subpackages import each other in a circle, else 0."""
        try:
            TopologicalSorter(self.imports).prepare()
        except CycleError:
            return 1
        return 0

    def upward(self, layers: Sequence[Sequence[str]]) -> list[str]:
        """Imports of a subpackage that is not in a lower layer."""
        layer = {
            subpackage: number
            for number, subpackages in enumerate(layers)
            for subpackage in subpackages
        }
        return [
            f"{self.package}: {subpackage} imports {other}"
            for subpackage, others in sorted(self.imports.items())
            for other in sorted(others)
            if layer[other] <= layer[subpackage]
        ]


def contracts() -> Iterator[tuple[str, list[list[str]]]]:
    """Each package with its layers, the highest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for contract in project["tool"]["importlinter"]["contracts"]:
        if contract.get("exhaustive"):
            layers = [
                [subpackage.strip() for subpackage in line.split("|")]
                for line in contract["layers"]
            ]
            yield contract["containers"][0], layers


def subpackages_of(package: str) -> Subpackages:
    """Reads the subpackages from the package's source."""
    graph = grimp.build_graph(package)
    imports: dict[str, set[str]] = {}
    for module in graph.modules - {package}:
        subpackage = module.split(".")[1]
        others = graph.find_modules_directly_imported_by(module) - {package}
        found = {other.split(".")[1] for other in others} - {subpackage}
        imports.setdefault(subpackage, set()).update(found)
    return Subpackages(
        package, {subpackage: frozenset(others) for subpackage, others in imports.items()}
    )


def main() -> None:
    circles, upward = 0, list[str]()
    for package, layers in contracts():
        subpackages = subpackages_of(package)
        count = len(subpackages.imports)
        if count > MOST_SUBPACKAGES:
            sys.exit(f"{package} has {count} subpackages, more than {MOST_SUBPACKAGES}")
        circles += subpackages.circles
        upward += subpackages.upward(layers)
        sys.stdout.write(f"{package}: {count} subpackages in {len(layers)} layers\n")
    sys.stdout.write(f"circles: {circles}, imports upward: {len(upward)}\n")
    if circles or upward:
        sys.exit("\n".join(upward) or "subpackages import each other in a circle")


if __name__ == "__main__":
    main()
