"""The arguments of `headrace redis users|grant|revoke`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..tables import Output
from .queues import DATA_DIR, DataFolder, Url

if TYPE_CHECKING:
    from ..queues.queues import QueueSession

app = typer.Typer(
    name="redis",
    help="Redis users: one for each role, and for the engines of one model alone.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="MODEL", help="Name that clients use.")]
Owner = Annotated[str, typer.Option(help="namespace/name of its ModelService; default: none.")]


@app.command(epilog="Example: headrace redis users --model headrace-demo")
def users(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="Users for the engines of these; default: those of roles."),
    ] = None,
) -> None:
    """Print users as lines of an ACL file, without passwords: add one to each, as >PASSWORD."""
    from headrace_common.protocol.redis.users import ROLES, model_line, role_line

    for line in map(model_line, model) if model else map(role_line, ROLES):
        typer.echo(line)


@app.command(epilog="Example: headrace redis grant headrace-demo --owner team-a/headrace-demo")
def grant(
    model: Name,
    owner: Owner = "",
    adapter: Annotated[
        list[str] | None, typer.Option(help="A LoRA adapter that they may serve, repeatable.")
    ] = None,
    redis: Url = None,
    data_dir: DataFolder = DATA_DIR,
) -> None:
    """Let engines that have the model's own user register it."""
    from headrace_common.protocol.registry import RegistrationGrant

    from ..queues.grants import give

    give(
        _session(redis, data_dir),
        model,
        RegistrationGrant(owner=owner, adapters=tuple(adapter or ())),
    )


@app.command(epilog="Example: headrace redis revoke headrace-demo")
def revoke(
    model: Name, owner: Owner = "", redis: Url = None, data_dir: DataFolder = DATA_DIR
) -> None:
    """Take that back, with what they have registered."""
    from ..queues.grants import take

    take(_session(redis, data_dir), model, owner)


def _session(url: str | None, data_dir: Path) -> "QueueSession":
    from ..queues.queues import QueueSession, queue_url

    return QueueSession(queue_url(url, data_dir), Output())
