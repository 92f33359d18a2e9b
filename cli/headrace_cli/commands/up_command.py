"""How `headrace up`, `engine` and `gateway` read their command lines, with vLLM's flags translated.

The settings of the processes are imported when a command line is read: they take a second.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from ..errors import UsageError
from ..flags.flag import Arity, Flag
from ..tables import without_controls

if TYPE_CHECKING:
    from ..flags.given_flags import GivenFlags

_FLAGS = "headrace.flags"
HELP = "--help"


class UpCommand(TyperCommand):
    """A command that keeps flags that are not its own for `passed_on`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[MODEL]", *super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing or HELP in args:
            return super().parse_args(ctx, args)
        own = {
            name.lstrip("-").replace("-", "_"): Arity.ONE
            for parameter in self.params
            for name in parameter.opts
        }
        given = _read(args, own)
        ctx.meta[_FLAGS] = [flag for flag in given.flags if flag.name not in own]
        mine = [flag for flag in given.flags if flag.name in own]
        mine += _model(given.words, mine)
        return super().parse_args(ctx, [flag.word(switch=False) for flag in mine])


def passed_on(context: typer.Context) -> Sequence[Flag]:
    """The flags of engines and gateways."""
    flags: Sequence[Flag] = context.meta.get(_FLAGS, ())
    return flags


def process_words(process: str, words: Sequence[str]) -> list[str]:
    """The command line of an engine's or a gateway's process. Raises UsageError.

    The process itself checks the values.
    """
    from ..flags.assignment import owner
    from ..flags.process_settings import Process, ProcessSettings

    if HELP in words or "-h" in words:
        return [HELP]
    given = _read(words)
    if given.words:
        raise UsageError(f"unexpected argument {given.words[0]!r}", "a model is given with --model")
    settings = ProcessSettings(Process(process))
    for flag in given.flags:
        if flag.name not in settings.names:
            raise UsageError(
                f"{flag.typed} is not a flag of `{settings.program}`",
                f"it is one of `{owner(flag.name)}`",
            )
    return settings.words(given.flags)


def _read(words: Sequence[str], own: dict[str, Arity] | None = None) -> "GivenFlags":
    """The flags of a command line; says which of them have no effect."""
    from ..flags.assignment import known_flags
    from ..flags.given_flags import given_flags

    given = given_flags(words, {**known_flags(), **(own or {})})
    for note in given.notes:
        Console(stderr=True).print(without_controls(note), markup=False, soft_wrap=True)
    return given


def _model(words: Sequence[str], flags: Sequence[Flag]) -> list[Flag]:
    """The model that was given without --model, as in `headrace serve MODEL`."""
    surplus = words if any(flag.name == "model" for flag in flags) else words[1:]
    if surplus:
        raise UsageError(f"unexpected argument {surplus[0]!r}", "one model is served")
    return [Flag("model", word, "MODEL") for word in words]
