"""`headrace top`: shows the snapshots of a gateway until Ctrl-C."""

import asyncio
import json
import sys
from contextlib import aclosing, suppress

from rich.console import Console
from rich.live import Live

from ..tables import Output
from .live_stream import Disconnected, LiveStream
from .snapshot import Snapshot
from .view import draw

# Engines report their batch only after a console has asked; `--once` waits this long for them.
_DETAIL_SECONDS = 5.0
_RETRY_SECONDS = 1.0


def show_once(stream: LiveStream, output: Output) -> None:
    """Prints one snapshot. Raises CliError."""
    text, snapshot = asyncio.run(_detailed(stream))
    output.show(json.loads(text), draw(snapshot))


async def _detailed(stream: LiveStream) -> tuple[str, Snapshot]:
    """The first snapshot in which all engines report their batch, or the last one before the time
    limit."""
    latest: tuple[str, Snapshot] | None = None
    with suppress(TimeoutError):
        async with asyncio.timeout(_DETAIL_SECONDS), aclosing(stream.snapshots()) as snapshots:
            async for latest in snapshots:
                if latest[1].detailed:
                    break
    if latest is None:
        raise Disconnected(f"the gateway sent nothing in {_DETAIL_SECONDS:g} s")
    return latest


def stream_json(stream: LiveStream) -> None:
    """Prints each snapshot as a line of JSON until Ctrl-C. Raises CliError."""

    async def run() -> None:
        async for text, _ in stream.snapshots():
            _print_json(text)

    asyncio.run(run())


def _print_json(text: str) -> None:
    """Prints `text` as one line, since a server-sent event must not contain a line break."""
    sys.stdout.write(text.replace("\n", " ") + "\n")
    sys.stdout.flush()


def watch(stream: LiveStream, out: Console) -> None:
    """Shows a live view until Ctrl-C; reconnects after an interruption.

    Raises CliError if the first connection fails or the gateway refuses.
    """
    asyncio.run(_watch(stream, out))


async def _watch(stream: LiveStream, out: Console) -> None:
    latest: Snapshot | None = None
    with Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            try:
                async for _, latest in stream.snapshots():
                    live.update(draw(latest), refresh=True)
            except Disconnected as error:
                if latest is None:
                    raise
                live.update(draw(latest, f"{error}; trying again"), refresh=True)
            await asyncio.sleep(_RETRY_SECONDS)
