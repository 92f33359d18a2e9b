"""The arguments of `headrace redis users|grant|revoke`."""

from typing import Annotated

import typer

from ..running import DATA_DIR
from .queues import Url, queue_session
from .running_options import DataFolder

app = typer.Typer(
    rich_markup_mode="markdown",
    name="redis",
    help="Print Redis users, and grant or revoke the registration of a model.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="MODEL", help="Name that clients use.")]
Owner = Annotated[str, typer.Option(help="namespace/name of its ModelService; default: none.")]


@app.command(epilog="Example: headrace redis users --model headrace-demo")
def users(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="Models whose engines get a user, repeatable; default: the users of the roles.",
        ),
    ] = None,
    sharing_group: Annotated[
        str | None,
        typer.Option(help="The group in which the models' engines share an accelerator."),
    ] = None,
) -> None:
    """Print users as lines of an ACL file, without passwords: add >PASSWORD to each line."""
    from headrace_common.protocol.redis.users import ROLES, model_line, role_line

    of_models = [model_line(name, sharing_group) for name in model or ()]
    for line in of_models or map(role_line, ROLES):
        typer.echo(line)


@app.command(epilog="Example: headrace redis grant headrace-demo --owner team-a/headrace-demo")
def grant(
    model: Name,
    owner: Owner = "",
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="A LoRA adapter that the engines may serve, repeatable."),
    ] = None,
    redis: Url = None,
    data_dir: DataFolder = DATA_DIR,
) -> None:
    """Let engines with the Redis user of a model register it."""
    from headrace_common.protocol.registry import RegistrationGrant

    from ..queues import grants

    grants.grant(
        queue_session(redis, data_dir),
        model,
        RegistrationGrant(owner=owner, adapters=tuple(adapter or ())),
    )


@app.command(epilog="Example: headrace redis revoke headrace-demo")
def revoke(
    model: Name, owner: Owner = "", redis: Url = None, data_dir: DataFolder = DATA_DIR
) -> None:
    """Remove a model's grant and its registration."""
    from ..queues import grants

    grants.revoke(queue_session(redis, data_dir), model, owner)
