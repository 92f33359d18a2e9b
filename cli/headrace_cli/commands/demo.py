"""The arguments of `headrace demo`."""

from typing import Annotated

import typer
from rich.console import Console

from ..extras import need
from ..tables import Output

app = typer.Typer(rich_markup_mode="markdown")


@app.command(epilog="Example: headrace demo --fast")
def demo(
    fast: Annotated[bool, typer.Option("--fast", help="Leave out the pauses for reading.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the results as JSON; the story goes to standard error."),
    ] = False,
) -> None:
    """A tour of one minute: an engine is killed in the middle of a stream, and nothing is lost.

    It starts a system of its own and stops it at the end. Exit code 0: every answer had the same
    bytes as without the failure.
    """
    need("up", "httpx", "psutil", "torch", "fastapi")
    from ..demo.demo import run_demo

    same = run_demo(Output(as_json), Console(stderr=as_json), fast=fast)
    raise typer.Exit(0 if same else 1)
