"""How `headrace up` reads its command line: its own flags, and those of engines and gateways."""

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from ..errors import UsageError
from ..flags.assignment import known_flags
from ..flags.command_line import read_words
from ..flags.flag import Arity, Flag

_FLAGS = "headrace.flags"
_HELP = "--help"


class UpCommand(TyperCommand):
    """A command that keeps flags that are not its own for `passed_on`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing or _HELP in args:
            return super().parse_args(ctx, args)
        own = {
            name.lstrip("-").replace("-", "_"): Arity.ONE
            for parameter in self.params
            for name in parameter.opts
        }
        given = read_words(args, {**known_flags(), **own})
        ctx.meta[_FLAGS] = [flag for flag in given.flags if flag.name not in own]
        mine = [flag for flag in given.flags if flag.name in own]
        mine += _model(given.words, mine)
        return super().parse_args(ctx, [flag.word(switch=False) for flag in mine])


def passed_on(context: typer.Context) -> Sequence[Flag]:
    """The flags of engines and gateways."""
    flags: Sequence[Flag] = context.meta.get(_FLAGS, ())
    return flags


def _model(words: Sequence[str], flags: Sequence[Flag]) -> list[Flag]:
    """The model that was given without --model, as in `headrace serve MODEL`."""
    surplus = words if any(flag.name == "model" for flag in flags) else words[1:]
    if surplus:
        raise UsageError(f"unexpected argument {surplus[0]!r}", "one model is served")
    return [Flag("model", word, "MODEL") for word in words]
