"""Prints the output of commands: tables with unwrapped rows, for use in scripts, or JSON."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Column, Table

from .errors import UsageError

WIDEST = 1000  # columns
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Output:
    """The consoles of a command. Results go to `out`, notes for a person to `notes`."""

    as_json: bool = False
    out: Console = field(default_factory=lambda: Console(width=WIDEST))
    notes: Console = field(default_factory=lambda: Console(width=WIDEST, stderr=True))

    def show(self, data: Any, table: RenderableType) -> None:
        if self.as_json:
            self.json(data)
        else:
            self.out.print(table)

    def tell(self, data: Any, note: str) -> None:
        """Prints the result of a command that changes something: data as JSON, or a note."""
        if self.as_json:
            self.json(data)
        else:
            self.notes.print(note, markup=False)

    def show_line(self, data: Any, line: str) -> None:
        """A result that is one line, for scripts."""
        if self.as_json:
            self.json(data)
        else:
            self.raw(line + "\n")

    def json(self, data: Any) -> None:
        self.raw(json.dumps(data, indent=2) + "\n")

    def raw(self, text: str) -> None:
        self.out.file.write(text)


def check_folder(path: Path) -> None:
    """Raises UsageError if the folder of a result is missing; called before long work."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"the folder of {path} does not exist", "make it, or choose another")


def without_controls(text: str) -> str:
    """The text of a server or model without characters that move the cursor or change colours."""
    return _CONTROL.sub("", text)


def plain_table(*names: str) -> Table:
    columns = [Column(name, no_wrap=True, overflow="ignore") for name in names]
    return Table(*columns, box=None, pad_edge=False)
