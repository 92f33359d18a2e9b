"""Tables of the commands that show a running system: rows are never folded, so that a script can
cut them too."""

from rich.console import Console
from rich.table import Column, Table

WIDEST = 1000  # columns


def wide_console(*, stderr: bool = False) -> Console:
    return Console(width=WIDEST, stderr=stderr)


def plain_table(*names: str) -> Table:
    columns = [Column(name, no_wrap=True, overflow="ignore") for name in names]
    return Table(*columns, box=None, pad_edge=False)
