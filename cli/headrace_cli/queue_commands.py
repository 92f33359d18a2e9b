"""The arguments of `headrace queue status|peek|dead|replay|purge`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .tables import wide_console

if TYPE_CHECKING:
    from .queues import Desk

app = typer.Typer(
    name="queue",
    help="The queues of a running system: what waits, what was set aside, and what to do with it.",
    no_args_is_help=True,
)

Url = Annotated[
    str | None,
    typer.Option(
        "--redis",
        envvar="REDIS_URL",
        help="Redis or Valkey; default: that of a running `headrace up`, else this host's.",
    ),
]
DataFolder = Annotated[Path, typer.Option("--data-dir", help="Of `headrace up`.")]
Model = Annotated[
    str | None, typer.Option("--model", help="Name that clients use; default: the only one.")
]
Models = Annotated[
    list[str] | None, typer.Option("--model", help="Repeatable; default: all there are.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Limit = Annotated[int, typer.Option(min=1, max=100_000, help="Most that are listed.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Requests.")]
DATA_DIR = Path(".headrace")


@app.command()
def status(
    model: Models = None,
    redis: Url = None,
    data_dir: DataFolder = DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Each model's queue and its engines."""
    from .queues import show_status

    show_status(_desk(redis, data_dir, as_json), model)


@app.command()
def peek(
    model: Model = None,
    running: Annotated[
        bool, typer.Option("--running", help="Those that engines have, not those that wait.")
    ] = False,
    limit: Limit = 20,
    redis: Url = None,
    data_dir: DataFolder = DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """The next requests of a queue; never their prompts."""
    from .queues import show_requests

    show_requests(_desk(redis, data_dir, as_json), model, limit=limit, running=running)


@app.command()
def dead(
    model: Model = None,
    limit: Limit = 20,
    redis: Url = None,
    data_dir: DataFolder = DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Requests that were set aside: why, and whether they can be replayed."""
    from .queues import show_dead

    show_dead(_desk(redis, data_dir, as_json), model, limit)


@app.command()
def replay(
    model: Model = None,
    request_ids: Ids = None,
    every: Annotated[bool, typer.Option("--all", help="All that can be.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that each may take.")] = 600.0,
    redis: Url = None,
    data_dir: DataFolder = DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Queue dead letters' requests again, with their failures forgotten."""
    from .queues import replay as run

    run(_desk(redis, data_dir, as_json), model, _chosen(request_ids, every), timeout)


@app.command()
def purge(
    model: Model = None,
    request_ids: Ids = None,
    every: Annotated[bool, typer.Option("--all", help="All dead letters.")] = False,
    waiting: Annotated[
        bool, typer.Option("--waiting", help="Cancel what waits instead; clients get an error.")
    ] = False,
    redis: Url = None,
    data_dir: DataFolder = DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Forget dead letters with what was kept of their requests, or cancel what waits."""
    from .queues import cancel_waiting
    from .queues import purge as run

    desk = _desk(redis, data_dir, as_json)
    if waiting:
        cancel_waiting(desk, model)
    else:
        run(desk, model, _chosen(request_ids, every))


def _chosen(request_ids: list[str] | None, every: bool) -> list[str] | None:
    """None for all."""
    from .errors import UsageError

    if every == bool(request_ids):
        raise UsageError("say which requests", "give their ids, or --all")
    return None if every else request_ids


def _desk(redis: str | None, data_dir: Path, as_json: bool) -> "Desk":
    from .queues import Desk, queue_url

    return Desk(queue_url(redis, data_dir), wide_console(), Console(stderr=True), as_json)
