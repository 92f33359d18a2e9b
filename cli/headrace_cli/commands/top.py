"""The arguments of `headrace top`."""

from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console

from ..extras import need
from ..running import DATA_DIR, api_url
from ..tables import Output
from .running_options import ApiKey, ApiUrl, DataFolder

app = typer.Typer(rich_markup_mode="markdown")


@app.command(epilog="Example: headrace top --url http://headrace.example.com --api-key sk-...")
def top(
    url: ApiUrl = None,
    data_dir: DataFolder = DATA_DIR,
    api_key: ApiKey = None,
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each snapshot.")
    ] = False,
) -> None:
    """Watch queues, engines and KV caches of a deployment.

    Without a terminal it prints one table. Ctrl-C ends it with exit code 0.
    """
    need("up", "httpx")
    from ..top.live_stream import LiveStream
    from ..top.top import show_once, stream_json, watch

    stream, terminal = LiveStream(api_url(url, data_dir), api_key), Console()
    with suppress(KeyboardInterrupt):
        if as_json and not once:
            stream_json(stream)
        elif once or not terminal.is_terminal:
            show_once(stream, Output(as_json))
        else:
            watch(stream, terminal)
