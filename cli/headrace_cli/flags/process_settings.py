"""The settings of engines and gateways: which flags they have, and whether values are valid.

The classes are imported by name, since packages meet only in headrace_common. This imports neither
torch nor fastapi, so that a wrong flag is named within a second.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn, get_args, get_origin

from pydantic_settings import BaseSettings

from headrace_common.config.process import Fault, InvalidSettings, parse_settings

from ..errors import UsageError
from .flag import Arity, Flag, option

_MOST_SHOWN = 100
# How pydantic-settings says that it cannot read a list or an object.
_UNPARSED = re.compile(r"Parsing error encountered for (\w+):")
# Settings that name files which must exist at the start.
_FILES = ("chat_template", "api_keys_file", "sealing_keys_file")
_INLINE = "write the template into a file and give its path"
_FOLDERS = ("redis_credentials",)


class Process(StrEnum):
    """The processes that take flags."""

    ENGINE = "engine"
    GATEWAY = "gateway"


_CLASSES = {
    Process.ENGINE: "headrace_engine.serving.settings:EngineSettings",
    Process.GATEWAY: "headrace_gateway.settings:GatewaySettings",
}


@dataclass(frozen=True)
class ProcessSettings:
    """The settings of one kind of process."""

    process: Process

    @cached_property
    def kind(self) -> type[BaseSettings]:
        found: type[BaseSettings] = resolve_name(_CLASSES[self.process])
        return found

    @property
    def program(self) -> str:
        return f"headrace {self.process}"

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.kind.model_fields)

    @cached_property
    def arities(self) -> dict[str, Arity]:
        """The flags of the process, and how many values each has."""
        fields = self.kind.model_fields.items()
        return {name: _arity(field.annotation) for name, field in fields}

    def words(self, flags: Iterable[Flag]) -> list[str]:
        """The command line that gives these flags to the process."""
        return [flag.word(self.arities[flag.name] is Arity.SWITCH) for flag in flags]

    def print_help(self) -> NoReturn:
        """Prints the flags and ends the process."""
        kind: Any = self.kind  # as in `read`
        parse_settings(kind, self.program, ["--help"])
        raise AssertionError("the parser has ended the process")

    def read(self, flags: Sequence[Flag]) -> Any:
        """The settings that these flags and the environment give.

        Raises UsageError, which names every invalid value once.
        """
        given = {flag.name: flag for flag in flags}
        try:
            # The type is not bound to LoggedSettings, since the class is known only at run time.
            kind: Any = self.kind
            settings = parse_settings(kind, self.program, self.words(flags))
        except InvalidSettings as error:
            problems = (self._told(fault, given) for fault in error.faults)
            raise UsageError("; ".join(dict.fromkeys(problems))) from error
        for name in (*_FILES, *_FOLDERS):
            if (path := getattr(settings, name, None)) is not None:
                _must_be(
                    name, Path(path), given[name].typed if name in given else self._named(name)
                )
        return settings

    def _told(self, fault: Fault, given: dict[str, Flag]) -> str:
        name, _, inner = fault.setting.partition(".")
        problem = fault.problem.removeprefix("Value error, ")
        if unparsed := _UNPARSED.match(fault.problem):
            name, problem = unparsed[1], "is not valid: give JSON"
        if name not in self.names:
            return str(fault)
        if name not in given:
            return f"{self._named(name)}: {problem}"
        flag = given[name]
        field = f" ({inner})" if inner else ""
        return f"{flag.typed} {flag.value[:_MOST_SHOWN]}{field}: {problem}"

    def _named(self, name: str) -> str:
        """The name of a setting, which may come from a flag or from the environment."""
        prefix = self.kind.model_config.get("env_prefix", "")
        return f"{option(name)} ({prefix}{name.upper()})"


def _must_be(name: str, path: Path, named: str) -> None:
    if path.is_dir() if name in _FOLDERS else path.is_file():
        return
    what = "folder" if name in _FOLDERS else "file"
    remedy = _INLINE if "{{" in str(path) or "{%" in str(path) else f"give the path of a {what}"
    if name == "api_keys_file":
        remedy = f"`headrace keys create NAME --file {path}` makes it"
    raise UsageError(f"{named}: {str(path)[:_MOST_SHOWN]} is not a {what} here", remedy)


def _arity(annotation: Any) -> Arity:
    if annotation is bool:
        return Arity.SWITCH
    forms = {get_origin(part) or part for part in (annotation, *get_args(annotation))}
    return Arity.MANY if forms & {dict, list, tuple} else Arity.ONE
