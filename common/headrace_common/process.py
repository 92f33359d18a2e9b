"""How a Headrace process starts and ends: its settings, read once, and its exit codes."""

import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Protocol, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp
from pydantic_settings import SettingsError as SettingsSourceError

from . import logs
from .errors import SettingsError

EXIT_CONFIG = os.EX_CONFIG  # starting again would not help
EXIT_FAILED = os.EX_SOFTWARE
EXIT_UNAVAILABLE = os.EX_UNAVAILABLE  # Redis may be there next time


# Named like settings: `headrace debug` reads the first, Kubernetes makes the others for Services.
_OF_OTHERS = re.compile(r".*_(METRICS_URL|SERVICE_(HOST|PORT).*|PORT_\d+_(TCP|UDP).*)")

_OF_ARGUMENTS = "error parsing CLI: "

_log = logging.getLogger(__name__)


class LoggedSettings(Protocol):
    """The settings that every process has."""

    @property
    def log_level(self) -> str: ...
    @property
    def log_format(self) -> logs.LogFormat: ...


S = TypeVar("S", bound=LoggedSettings)


def read_settings(kind: type[S], program: str, arguments: list[str] | None) -> S | None:
    """Settings from flags and the environment, with logs set up as they say.

    None where they cannot be used: what is wrong is on stderr, behind the program's name, and the
    process should end with EXIT_CONFIG. A variable that is named like a setting and is none is
    logged: it has no effect, and whoever set it may think that it has.
    """
    try:
        settings: S = CliApp.run(kind, cli_args=arguments, cli_exit_on_error=False)
        logs.configure(settings.log_level, settings.log_format)
    except ValidationError as error:
        problems = [f"{_path(problem['loc'])}: {problem['msg']}" for problem in error.errors()]
    except (SettingsError, SettingsSourceError) as error:
        problems = [_plain(str(error), program)]
    else:
        for variable, meant in _no_settings(kind, os.environ):
            _log.warning("no such setting", extra={"variable": variable, "meant": meant})
        return settings
    for problem in problems:
        print(f"{program}: {problem}", file=sys.stderr)  # noqa: T201
    return None


def _no_settings(kind: object, environ: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """Each such variable, and the setting that it is likely a misspelling of."""
    assert isinstance(kind, type) and issubclass(kind, BaseSettings)
    prefix = kind.model_config.get("env_prefix") or ""
    known = [f"{prefix}{name}".upper() for name in kind.model_fields]
    for variable in sorted(environ):
        name = variable.upper()
        ours = bool(prefix) and name.startswith(prefix.upper())
        if ours and name not in known and not _OF_OTHERS.fullmatch(name):
            yield variable, next(iter(get_close_matches(name, known, n=1, cutoff=0.9)), None)


def _plain(problem: str, program: str) -> str:
    """What is wrong with a command line, without its whole grammar."""
    fault = problem.removeprefix(_OF_ARGUMENTS)
    return problem if fault == problem else f"{fault} (see `{program} --help`)"


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location))
