"""The arguments of `headrace adapters list|load|unload`."""

from typing import Annotated

import typer

from ..running import DATA_DIR
from .queues import AsJson, Model, Url, queue_session
from .running_options import DataFolder

app = typer.Typer(
    rich_markup_mode="markdown",
    name="adapters",
    help="List, load and unload LoRA adapters while engines serve.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name that clients use as a model.")]


@app.command("list", epilog="Example: headrace adapters list --model headrace-demo")
def list_adapters(
    model: Model = None,
    retired: Annotated[
        bool, typer.Option("--all", help="Also those that were removed and may still run.")
    ] = False,
    redis: Url = None,
    data_dir: DataFolder = DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Show the adapters of a model, and how many engines have them."""
    from ..queues.adapters import show_adapters

    show_adapters(queue_session(redis, data_dir, as_json), model, retired=retired)


@app.command(epilog="Example: headrace adapters load sql /adapters/sql")
def load(
    name: Name,
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="Folder inside of the engines' lora_dir, hub id, or s3://bucket/folder.",
        ),
    ],
    model: Model = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an adapter of this name.")
    ] = False,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds within which an engine must have loaded it.")
    ] = 60.0,
    redis: Url = None,
    data_dir: DataFolder = DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Have all engines of a model load an adapter; returns once the first one has it."""
    from ..queues.adapters import load_adapter

    session = queue_session(redis, data_dir, as_json)
    load_adapter(session, model, name, path, replaces=replace, wait=wait)


@app.command(epilog="Example: headrace adapters unload sql")
def unload(
    name: Name,
    model: Model = None,
    redis: Url = None,
    data_dir: DataFolder = DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Stop serving an adapter; requests that were accepted before are finished."""
    from ..queues.adapters import unload_adapter

    unload_adapter(queue_session(redis, data_dir, as_json), model, name)
