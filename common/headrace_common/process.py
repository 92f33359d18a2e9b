"""How a Headrace process starts and ends: its settings, read once, and its exit codes."""

import os
import sys
from typing import Protocol, TypeVar

from pydantic import ValidationError
from pydantic_settings import CliApp
from pydantic_settings import SettingsError as SettingsSourceError

from . import logs
from .errors import SettingsError

EXIT_CONFIG = os.EX_CONFIG  # starting again would not help
EXIT_FAILED = os.EX_SOFTWARE
EXIT_UNAVAILABLE = os.EX_UNAVAILABLE  # Redis may be there next time


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
    process should end with EXIT_CONFIG.
    """
    try:
        settings: S = CliApp.run(kind, cli_args=arguments)
        logs.configure(settings.log_level, settings.log_format)
    except ValidationError as error:
        problems = [f"{_path(problem['loc'])}: {problem['msg']}" for problem in error.errors()]
    except (SettingsError, SettingsSourceError) as error:
        problems = [str(error)]
    else:
        return settings
    for problem in problems:
        print(f"{program}: {problem}", file=sys.stderr)  # noqa: T201
    return None


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location))
