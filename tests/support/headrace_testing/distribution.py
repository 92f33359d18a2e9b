"""Test files that go to one worker of pytest-xdist, and what the tests of a folder share there."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeVar

from xdist.scheduler import LoadFileScheduling

TESTS = Path(__file__).parents[2]
T = TypeVar("T")


def _e2e(*names: str) -> tuple[str, ...]:
    return tuple(f"test_e2e/test_{name}.py" for name in names)


# Files whose tests share processes that take seconds to start, in the order in which they run.
TOGETHER: Mapping[str, tuple[str, ...]] = {
    # These fork their processes from one that has imported the programs.
    "forked": (
        "test_chaos/test_faults.py",
        *_e2e("nodes", "canary", "images", "adapter_rounds", "placement", "discovery", "lora"),
        *_e2e("checkpoints", "image_sharing", "costly_grammars", "policies"),
    ),
    # So do these; two engines and two gateways stay for most of them.
    "stack": _e2e(
        *("disaggregated_prefill", "previous_release", "proxies", "queue_shards", "reasoning"),
        *("resume", "sdk_tours", "sealing", "sharing", "speculation", "streams"),
        *("structured_outputs", "termination", "tools"),
    ),
    # `console` counts the requests since the start.
    "paced": _e2e("console", "console_page"),
    # `idle` measures processes that no other test has used.
    "served": _e2e("idle", "debug", "demo_model", "examples", "readme", "terminal", "up"),
    "single": _e2e("bad_input", "cancel", "hostile_clients", "probes", "tracing"),
}
UNITS = {file: unit for unit, files in TOGETHER.items() for file in files}

# Workers get these first, as they take longest. Units mostly wait, and the engine's files compute:
# half of the workers have one kind, half the other.
FIRST = (
    *("forked", "test_engine/models/test_images.py"),
    *("stack", "test_engine/models/test_models.py"),
    *("test_engine/models/test_schedules.py", "test_engine/distributed/test_tensor_parallel.py"),
    *("paced", "test_engine/models/test_hybrid.py"),
    *("served", "test_engine/models/test_published.py"),
    *("single", "test_engine/speculative/test_draft_heads.py"),
)


def unit_of(path: Path) -> str | None:
    """The unit of a test file; None if it shares nothing."""
    return UNITS.get(_file(path))


def place(path: Path) -> tuple[int, int]:
    """Sorts test files: those of `FIRST`, units in the order of their files, and all others."""
    file = _file(path)
    unit = UNITS.get(file, file)
    within = TOGETHER.get(unit, ())
    return (
        FIRST.index(unit) if unit in FIRST else len(FIRST),
        within.index(file) if file in within else 0,
    )


def _file(path: Path) -> str:
    """The path of a test file as UNITS names it; empty if it is elsewhere."""
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""


def check_unit(user: Path, *units: str) -> None:
    """A file of another unit may run in another worker, which would start everything again."""
    shared = " or ".join(units)
    assert unit_of(user) in units, f"{user.name} uses what {shared} shares: add it in {__name__}"


class TogetherScheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives workers whole files, and the files of a unit to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return unit_of(self.config.rootpath / file) or file


class Shared:
    """What tests of several files share: made when the first test needs it, closed by `close`."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._made: dict[str, Any] = {}

    def get(self, unit: str, user: Path, make: Callable[[], AbstractContextManager[T]]) -> T:
        """The object that the files of a unit share, for one of these files."""
        check_unit(user, unit)
        if unit not in self._made:
            self._made[unit] = self._open.enter_context(make())
        made: T = self._made[unit]
        return made

    def close(self) -> None:
        self._made.clear()
        self._open.close()
