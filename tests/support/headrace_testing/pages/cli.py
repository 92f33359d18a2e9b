"""Writes docs/cli.md, the page of every command, from the commands.

A test compares the page with the one made here; `make generated` renews it.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from headrace_cli.main import app
from headrace_operator.simulation.__main__ import app as simulation

PAGE = Path(__file__).resolve().parents[4] / "docs" / "cli.md"
EXAMPLE = "Example: "
# `headrace simulate` passes its options on to another program.
PASSED_ON = {"headrace simulate": get_command(simulation)}
INTRODUCTION = """\
# Commands

`headrace COMMAND --help` shows the same for each command. `headrace --install-completion` makes the
shell complete commands and options. Exit codes are 0 for success, 1 for a failure that a person or
the server can mend, and 2 for wrong usage; commands with more say so. Results are on standard
output, errors and progress on standard error. `--json` prints results for programs. Colours are for
terminals alone, and `NO_COLOR=1` turns them off.

`make generated` writes this page from the commands.
"""


def commands(group: Any = None, name: str = "headrace") -> Iterator[tuple[str, Any]]:
    """Every command with its full name, in the order of the help; groups are left out."""
    group = group or get_command(app)
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def example(command: Any) -> str:
    """The command line of its example."""
    return str(command.epilog or "").removeprefix(EXAMPLE)


def page() -> str:
    return "\n".join([INTRODUCTION, *(_section(*each) for each in commands())])


def _section(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    lines = [f"## {name}", "", command.help, "", f"    {usage}", f"    {example(command)}", ""]
    params = PASSED_ON.get(name, command).params
    rows = [row for parameter in params if (row := _row(parameter, context))]
    if rows:
        lines += ["| argument or option | effect |", "| --- | --- |", *rows, ""]
    return "\n".join(lines)


def _row(parameter: Any, context: Any) -> str | None:
    """A row of the table; None for a command that the help does not show."""
    record = parameter.get_help_record(context)
    if record is None:
        return None
    name, effect = (_plain(text).replace("|", "\\|") for text in record)
    return f"| `{name}` | {effect} |"


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("\\[", "[")).strip()


if __name__ == "__main__":
    PAGE.write_text(page())
