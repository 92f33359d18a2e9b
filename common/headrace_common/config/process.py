"""How a Headrace process starts and ends: its settings, read once, and its exit codes."""

import asyncio
import logging
import os
import re
import sys
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp
from pydantic_settings import SettingsError as SettingsSourceError

from ..errors import SettingsError
from ..observability import logs
from ..termination import SIGNALS

EXIT_CONFIG = os.EX_CONFIG  # a restart would not help
EXIT_FAILED = os.EX_SOFTWARE
EXIT_UNAVAILABLE = os.EX_UNAVAILABLE  # Redis may be available after a restart

TERMINATION_LOG = Path("/dev/termination-log")
"""The file for a container's last message, which Kubernetes shows in the pod's status."""
MAX_TERMINATION_MESSAGE = 2000  # characters; the kubelet accepts 4096 bytes

# Variables with the prefix of settings that are none: `headrace debug` reads the first, Kubernetes
# makes the others for Services.
_OF_OTHERS = re.compile(r".*_(METRICS_URL|SERVICE_(HOST|PORT).*|PORT_\d+_(TCP|UDP).*)")

_OF_ARGUMENTS = "error parsing CLI: "

_log = logging.getLogger(__name__)


class LoggedSettings(Protocol):
    """The settings of logs, which every process has."""

    @property
    def log_level(self) -> str: ...
    @property
    def log_format(self) -> logs.LogFormat: ...


S = TypeVar("S", bound=LoggedSettings)


@dataclass(frozen=True, slots=True)
class Fault:
    """A problem, and the setting that has it; without a setting, the command line has it."""

    problem: str
    setting: str = ""

    def __str__(self) -> str:
        return f"{self.setting}: {self.problem}" if self.setting else self.problem


class InvalidSettings(SettingsError):
    """Flags or variables that are not valid settings."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(map(str, self.faults)))


def parse_settings(kind: type[S], program: str, arguments: list[str] | None) -> S:
    """The settings that flags and the environment give. Raises InvalidSettings."""
    try:
        settings: S = CliApp.run(kind, cli_args=arguments, cli_exit_on_error=False)
    except ValidationError as error:
        faults = (Fault(problem["msg"], _path(problem["loc"])) for problem in error.errors())
        raise InvalidSettings(faults) from error
    except (SettingsError, SettingsSourceError) as error:
        raise InvalidSettings([Fault(_plain(str(error), program))]) from error
    return settings


def read_settings(kind: type[S], program: str, arguments: list[str] | None) -> S | None:
    """Reads settings from flags and the environment, and configures logs accordingly.

    Returns None if they are invalid: the problem is on stderr, after the program's name, and the
    process should end with EXIT_CONFIG. A variable whose name looks like a setting but is not one
    is logged, since it has no effect.
    """
    try:
        settings = parse_settings(kind, program, arguments)
        logs.configure(settings.log_level, settings.log_format)
    except InvalidSettings as error:
        problems = [str(fault) for fault in error.faults]
    except SettingsError as error:
        problems = [str(error)]
    else:
        for variable, meant in _no_settings(kind, os.environ):
            _log.warning(
                "variable is not a setting, so without effect",
                extra={"variable": variable, "meant": meant},
            )
        return settings
    for problem in problems:
        print(f"{program}: {problem}", file=sys.stderr)  # noqa: T201
    write_termination_message(SettingsError.code, "; ".join(problems))
    return None


def write_termination_message(code: str, problem: str) -> None:
    """Writes `code: problem` in one line as the pod's termination message; does nothing outside a
    pod.

    Without it the pod's status shows the end of the log, which may be the middle of a traceback.
    """
    line = logs.scrubbed(f"{code}: {' '.join(problem.split())}")
    with suppress(OSError):
        if TERMINATION_LOG.is_file():
            TERMINATION_LOG.write_text(line[:MAX_TERMINATION_MESSAGE])


async def run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`, which SIGTERM or SIGINT cancels unless it has set its own handlers."""
    task = asyncio.current_task()
    assert task is not None
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with suppress(asyncio.CancelledError):
        await work


async def before(work: Coroutine[Any, Any, None], event: asyncio.Event) -> bool:
    """Runs `work` until it ends or the event cancels it; returns whether it ended by itself.

    Errors of `work` are raised.
    """
    goal = asyncio.create_task(work)
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({goal, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if event.is_set():
            return False
        goal.result()
        return True
    finally:
        goal.cancel()
        waiting.cancel()
        await asyncio.gather(goal, waiting, return_exceptions=True)


def _no_settings(kind: object, environ: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """Variables that look like settings but are not, with the setting that was probably meant."""
    assert isinstance(kind, type) and issubclass(kind, BaseSettings)
    prefix = kind.model_config.get("env_prefix") or ""
    known = [f"{prefix}{name}".upper() for name in kind.model_fields]
    for variable in sorted(environ):
        name = variable.upper()
        ours = bool(prefix) and name.startswith(prefix.upper())
        if ours and name not in known and not _OF_OTHERS.fullmatch(name):
            yield variable, next(iter(get_close_matches(name, known, n=1, cutoff=0.9)), None)


def _plain(problem: str, program: str) -> str:
    """The problem with a command line, without the whole usage text."""
    fault = problem.removeprefix(_OF_ARGUMENTS)
    return problem if fault == problem else f"{fault} (see `{program} --help`)"


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location))
