"""Searches for plain prompts and answers while a test suite runs with sealing. Runs as a separate
process, since tests measure their own: `python -m headrace_testing.sealed_watch FOLDER KEYRING
PID`.

Searches the memory of the queue servers below the process PID and, when its input ends, all
append-only files below FOLDER. Then it prints its Findings as JSON.
"""

import json
import os
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from headrace_common.errors import MessageError
from headrace_common.sealing.keyring import Keyring, read_keyring

from .sealed_texts import SealedTexts, append_only_files, found_in

SERVERS = ("valkey-server", "redis-server")
EVERY_S = 10.0
AROUND = 100  # bytes that are shown before and after a finding


@dataclass
class Findings:
    """The result of the search.

    `needles` were searched for, `looks` times in memory and in `files` append-only files; `opened`
    is the number of opened values.
    """

    problems: list[str] = field(default_factory=list)
    needles: int = 0
    looks: int = 0
    files: int = 0
    opened: int = 0

    def __str__(self) -> str:
        return (
            f"sealed: {self.opened} values opened, {self.needles} rows and texts searched for in "
            f"{self.files} append-only files and {self.looks} times in memory"
        )


class Watch:
    """Reads the append-only files of a folder as they grow, and searches for the texts in them."""

    def __init__(self, folder: Path, keyring: Keyring) -> None:
        self._folder = folder
        self._texts = SealedTexts(keyring)
        self._ends: dict[Path, int] = {}
        self._told: set[object] = set()
        self.findings = Findings()

    def search_memory(self, parent: int) -> None:
        """Searches the memory of each server of `parent` that has its data in the folder, once."""
        self._read()
        needles = self._texts.needles()
        for process in servers(parent, self._folder):
            memory = memory_of(process.pid)
            self.findings.looks += bool(memory)
            self._search(f"the memory of {process.pid}", memory, needles)

    def search_files(self) -> None:
        """Searches every append-only file for all texts that were ever written."""
        self._read()
        needles, files = self._texts.needles(), append_only_files(self._folder)
        findings = self.findings
        for path in files:
            self._search(str(path), path.read_bytes(), needles)
        findings.problems += [f"not sealed: {one}" for one in sorted(self._texts.plain)]
        findings.needles, findings.files = len(needles), len(files)
        findings.opened = sum(self._texts.opened.values())

    def _search(self, place: str, data: bytes, needles: Mapping[bytes, str]) -> None:
        for needle in found_in(data, needles):
            at = data.find(needle)
            around = data[max(0, at - AROUND) : at + len(needle) + AROUND]
            self._problem(
                (place, needle), f"in {place}: {needles[needle]}: {needle!r} in {around!r}"
            )

    def _problem(self, mark: object, text: str) -> None:
        """Adds a finding once: memory is searched repeatedly."""
        if mark not in self._told:
            self._told.add(mark)
            self.findings.problems.append(text)

    def _read(self) -> None:
        for path in append_only_files(self._folder):
            data, end = path.read_bytes(), self._ends.get(path, 0)
            end = 0 if len(data) < end else end  # the file was rolled back
            try:
                self._ends[path] = end + self._texts.read(data[end:])
            except MessageError as error:
                self.findings.problems.append(f"{path}: {error}")
                self._ends[path] = len(data)


def servers(parent: int, folder: Path) -> Sequence[psutil.Process]:
    """The queue servers below a process that have their data below a folder."""
    return list(_servers(parent, folder))


def _servers(parent: int, folder: Path) -> Iterator[psutil.Process]:
    for process in psutil.Process(parent).children(recursive=True):
        try:
            is_server = process.name() in SERVERS or Path(process.exe()).name in SERVERS
            if is_server and Path(process.cwd()).is_relative_to(folder.resolve()):
                yield process
        except psutil.Error:
            continue  # it has just ended


def memory_of(pid: int) -> bytes:
    """The writable memory of a process; empty once it has ended."""
    parts = []
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        with open(f"/proc/{pid}/mem", "rb") as memory:
            for line in maps:
                where, rights, *_ = line.split()
                if rights.startswith("rw"):
                    first, last = (int(number, 16) for number in where.split("-"))
                    memory.seek(first)
                    parts.append(memory.read(last - first))
    except (OSError, ValueError):
        pass
    return b"".join(parts)


def main(folder: str, keyring: str, parent: str) -> None:
    os.nice(10)
    watch = Watch(Path(folder), read_keyring(Path(keyring).read_bytes()))
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        watch.search_memory(int(parent))
    watch.search_files()
    sys.stdout.write(json.dumps(asdict(watch.findings)))


if __name__ == "__main__":
    main(*sys.argv[1:])
