"""Checks Python, installed packages and the data folder. Imports none of those packages."""

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from .finding import Finding, fail, ok, warning

MIN_PYTHON = (3, 11)
_MIN_FREE_DISK = 2**30
_SHOWN = ("torch", "transformers", "fastapi", "redis")
_REQUIREMENT = re.compile(
    r"^(?P<name>[\w.-]+)[^>;]*>=(?P<minimum>[\w.]+).*extra == [\"'](?P<extra>\w+)"
)
UP = frozenset({"gateway", "engine", "up"})
ENGINE = frozenset({"engine"})


def python() -> Iterator[Finding]:
    found = platform.python_version()
    if sys.version_info[:2] < MIN_PYTHON:
        yield fail("python", found, "use Python 3.11 or newer")
    else:
        yield ok("python", f"{found} ({sys.executable})")


def packages(extras: frozenset[str] = UP) -> Iterator[Finding]:
    """Checks whether the packages of these extras are installed in new enough versions."""
    needed = _needed(extras)
    lacking = [problem for name, minimum in needed if (problem := _problem(name, minimum))]
    if lacking:
        extra = "up" if extras == UP else ",".join(sorted(extras))
        yield fail("packages", "; ".join(lacking), f"pip install --upgrade 'headrace[{extra}]'")
    else:
        names = {name for name, _ in needed} | {"headrace", "redis"}
        shown = (f"{name} {version(name)}" for name in ("headrace", *_SHOWN) if name in names)
        yield ok("packages", ", ".join(shown))


def _needed(extras: frozenset[str]) -> list[tuple[str, str]]:
    matches = (_REQUIREMENT.match(line) for line in requires("headrace") or ())
    return [(m["name"], m["minimum"]) for m in matches if m and m["extra"] in extras]


def _problem(name: str, minimum: str) -> str:
    try:
        found = version(name)
    except PackageNotFoundError:
        return f"{name} is not installed"
    return f"{name} {found} is older than {minimum}" if _parts(found) < _parts(minimum) else ""


def _parts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def data_dir(path: Path) -> Iterator[Finding]:
    existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        yield fail("data folder", f"{existing} cannot be written", "choose another --data-dir")
        return
    free = shutil.disk_usage(existing).free
    detail = f"{path.absolute()}, {free / 2**30:.1f} GiB free"
    if free < _MIN_FREE_DISK:
        yield warning("data folder", detail, "free some disk: the queue writes a log of requests")
    else:
        yield ok("data folder", detail)
