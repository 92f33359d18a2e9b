"""Counts what the rooms of each package import of each other: `make check` prints it.

    python -m headrace_testing.rooms

A room is a folder or module at the top of a package. Its floor is the line of the package's import
contract in pyproject.toml, which import-linter checks too.
"""

import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[3]
MOST_ROOMS = 25


@dataclass(frozen=True, slots=True)
class Rooms:
    """The rooms of a package, and which rooms each of them imports."""

    package: str
    imports: dict[str, frozenset[str]]

    @property
    def circles(self) -> int:
        """1 where rooms import each other in a circle."""
        try:
            TopologicalSorter(self.imports).prepare()
        except CycleError:
            return 1
        return 0

    def upward(self, floors: Sequence[Sequence[str]]) -> list[str]:
        """Imports of a room that is not on a lower floor."""
        floor = {room: number for number, rooms in enumerate(floors) for room in rooms}
        return [
            f"{self.package}: {room} imports {other}"
            for room, others in sorted(self.imports.items())
            for other in sorted(others)
            if floor[other] <= floor[room]
        ]


def contracts() -> Iterator[tuple[str, list[list[str]]]]:
    """Each package with its floors, the highest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for contract in project["tool"]["importlinter"]["contracts"]:
        if contract.get("exhaustive"):
            floors = [[room.strip() for room in line.split("|")] for line in contract["layers"]]
            yield contract["containers"][0], floors


def rooms_of(package: str) -> Rooms:
    """Read from the package's source."""
    graph = grimp.build_graph(package)
    imports: dict[str, set[str]] = {}
    for module in graph.modules - {package}:
        room = module.split(".")[1]
        others = graph.find_modules_directly_imported_by(module) - {package}
        found = {other.split(".")[1] for other in others} - {room}
        imports.setdefault(room, set()).update(found)
    return Rooms(package, {room: frozenset(others) for room, others in imports.items()})


def main() -> None:
    circles, upward = 0, list[str]()
    for package, floors in contracts():
        rooms = rooms_of(package)
        if len(rooms.imports) > MOST_ROOMS:
            sys.exit(f"{package} has {len(rooms.imports)} rooms, more than {MOST_ROOMS}")
        circles += rooms.circles
        upward += rooms.upward(floors)
        sys.stdout.write(f"{package}: {len(rooms.imports)} rooms on {len(floors)} floors\n")
    sys.stdout.write(f"circles: {circles}, imports upward: {len(upward)}\n")
    if circles or upward:
        sys.exit("\n".join(upward) or "rooms import each other in a circle")


if __name__ == "__main__":
    main()
