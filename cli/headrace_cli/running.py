"""The running `headrace up` of a data folder, as it describes itself in a file there.

The file is there from the moment that the API answers until the drain begins. A file whose `up` was
killed is recognised by the folder's lock, which ended with it.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .datadir import DataDir
from .errors import UsageError

DATA_DIR = Path(".headrace")
DEFAULT_URL = "http://127.0.0.1:8000"
_VERSION = 1
_FILE = "running.json"


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """An engine or a gateway. `metrics` is the URL of its metrics port."""

    name: str
    metrics: str


@dataclass(frozen=True, slots=True)
class RunningSystem:
    """A running `up`.

    `pid` is its own, `url` the API's without /v1, and `model` the name that clients use. `api_keys`
    tells whether requests need a key. `redis` may contain a password.
    """

    pid: int
    url: str
    model: str
    api_keys: bool
    redis: str
    engines: tuple[RunningProcess, ...]
    gateways: tuple[RunningProcess, ...]


@contextmanager
def described(system: RunningSystem, data: DataDir) -> Iterator[None]:
    """Writes the file, which only this user may read, and removes it at the end."""
    path = data.path / _FILE
    fresh = path.with_suffix(".new")
    with open(fresh, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        json.dump({"version": _VERSION, **asdict(system)}, file, indent=1)
    fresh.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def find_running(data_dir: Path) -> RunningSystem | None:
    """The system that runs with this folder; None if none does, or if its file is unreadable."""
    data = DataDir(data_dir)
    try:
        found = json.loads((data.path / _FILE).read_text())
        system = _system(found) if found["version"] == _VERSION else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return system if data.in_use() else None


def find_named(data_dir: Path) -> RunningSystem | None:
    """The system that runs with this folder; None if none does with the default folder.

    Raises UsageError if none does with another folder: it was named, so no other system is meant.
    """
    running = find_running(data_dir)
    if running is None and data_dir != DATA_DIR:
        raise UsageError(
            f"no `headrace up` serves with the data folder {data_dir}",
            "start it, name its folder with --data-dir, or give the address of another system",
        )
    return running


def _system(found: dict[str, Any]) -> RunningSystem:
    fields = {name: found[name] for name in ("pid", "url", "model", "api_keys", "redis")}
    return RunningSystem(
        **fields, engines=_processes(found["engines"]), gateways=_processes(found["gateways"])
    )


def _processes(found: list[dict[str, str]]) -> tuple[RunningProcess, ...]:
    return tuple(RunningProcess(one["name"], one["metrics"]) for one in found)


def api_url(given: str | None, data_dir: Path) -> str:
    """The URL of an OpenAI API: the given one, that of the `up` that runs with this folder, or the
    default. Raises UsageError if nothing runs with a folder other than the default one."""
    if given is not None:
        return given
    running = find_named(data_dir)
    return f"{DEFAULT_URL if running is None else running.url}/v1"


def engine_url(given: str | None, data_dir: Path, engine: str | None) -> str | None:
    """The URL of an engine's metrics port: the given one, or that of the named or first engine of a
    running `up`.

    None if nothing runs with the default folder. Raises UsageError if nothing runs with another
    folder, and for a name that no engine has.
    """
    if given is not None:
        return given
    running = find_named(data_dir)
    if running is None and engine is None:
        return None
    if running is None:
        raise UsageError(
            f"no `headrace up` runs with {data_dir}",
            "name its folder with --data-dir, or give --url",
        )
    for one in running.engines:
        if engine in (None, one.name):
            return one.metrics
    names = ", ".join(one.name for one in running.engines)
    raise UsageError(f"there is no engine {engine!r}", f"there is {names}")
