"""The arguments of `headrace queue status|peek|record|dead|replay|purge`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..running import DATA_DIR
from ..tables import Output
from .running_options import DataFolder

if TYPE_CHECKING:
    from ..queues.queues import QueueSession

app = typer.Typer(
    rich_markup_mode="markdown",
    name="queue",
    help="Show, replay and delete requests in the queues of a running system.",
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
Model = Annotated[
    str | None, typer.Option("--model", help="Name that clients use; default: the only one.")
]
Models = Annotated[
    list[str] | None, typer.Option("--model", help="Repeatable; default: all models.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Limit = Annotated[int, typer.Option(min=1, max=100_000, help="Largest number of lines.")]
KeysFile = Annotated[
    Path | None,
    typer.Option(
        envvar="HEADRACE_GATEWAY_SEALING_KEYS_FILE",
        help="Keys with which prompts are sealed, if they are.",
    ),
]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Ids of requests.")]


@app.command(epilog="Example: headrace queue status --json")
def status(
    model: Models = None,
    redis: Url = None,
    data_dir: DataFolder = DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Show each model's queue and its engines."""
    from ..queues.queues import show_status

    show_status(queue_session(redis, data_dir, as_json), model)


@app.command(epilog="Example: headrace queue peek --running --limit 50")
def peek(
    model: Model = None,
    running: Annotated[
        bool,
        typer.Option("--running", help="Show requests that engines have, not those that wait."),
    ] = False,
    limit: Limit = 20,
    redis: Url = None,
    data_dir: DataFolder = DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Show the next requests of a queue; never their prompts."""
    from ..queues.queues import show_requests

    show_requests(queue_session(redis, data_dir, as_json), model, limit=limit, running=running)


@app.command(epilog="Example: headrace queue record --model m --seconds 3600 --output trace.csv")
def record(
    output: Annotated[Path, typer.Option(help="CSV file to write.")],
    model: Model = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="How long to record; default: until Ctrl-C.")
    ] = None,
    redis: Url = None,
    data_dir: DataFolder = DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Record when requests come and how long they are, as a trace for headrace simulate."""
    from ..queues.traffic import record as run

    run(queue_session(redis, data_dir, as_json), model, output, seconds)


@app.command(epilog="Example: headrace queue dead --model headrace-demo")
def dead(
    model: Model = None,
    limit: Limit = 20,
    redis: Url = None,
    data_dir: DataFolder = DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Show dead letters: the reason, and whether they can be replayed."""
    from ..queues.queues import show_dead

    show_dead(queue_session(redis, data_dir, as_json), model, limit)


@app.command(epilog="Example: headrace queue replay --all")
def replay(
    model: Model = None,
    request_ids: Ids = None,
    every: Annotated[
        bool, typer.Option("--all", help="All dead letters that can be replayed.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds until the deadline of each.")
    ] = 600.0,
    sealing_keys_file: KeysFile = None,
    redis: Url = None,
    data_dir: DataFolder = DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Queue the requests of dead letters again, with their failures reset."""
    from ..queues.queues import replay as run

    session = queue_session(redis, data_dir, as_json, sealing_keys_file)
    run(session, model, _chosen(request_ids, every), timeout)


@app.command(epilog="Example: headrace queue purge --waiting --model headrace-demo")
def purge(
    model: Model = None,
    request_ids: Ids = None,
    every: Annotated[bool, typer.Option("--all", help="All dead letters.")] = False,
    waiting: Annotated[
        bool,
        typer.Option("--waiting", help="Cancel waiting requests instead; clients get an error."),
    ] = False,
    sealing_keys_file: KeysFile = None,
    redis: Url = None,
    data_dir: DataFolder = DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Delete dead letters with the stored data of their requests, or cancel waiting requests."""
    from ..queues.queues import cancel_waiting
    from ..queues.queues import purge as run

    session = queue_session(redis, data_dir, as_json, sealing_keys_file)
    if waiting:
        cancel_waiting(session, model)
    else:
        run(session, model, _chosen(request_ids, every))


def _chosen(request_ids: list[str] | None, every: bool) -> list[str] | None:
    """The ids that were given; None for all requests."""
    from ..errors import UsageError

    if every == bool(request_ids):
        raise UsageError("say which requests", "give their ids, or --all")
    return None if every else request_ids


def queue_session(
    redis: str | None, data_dir: Path, as_json: bool = False, keys_file: Path | None = None
) -> "QueueSession":
    """A session with the Redis that was named, or that of a running `headrace up`."""
    from ..queues.queues import QueueSession, queue_url

    return QueueSession(queue_url(redis, data_dir), Output(as_json), keys_file)
