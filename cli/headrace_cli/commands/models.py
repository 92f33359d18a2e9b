"""The arguments of `headrace models check|pull`."""

from typing import Annotated

import typer

from ..extras import need
from ..tables import Output

app = typer.Typer(
    rich_markup_mode="markdown",
    name="models",
    help="Check how a model would be served, or download it.",
    no_args_is_help=True,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(epilog="Example: headrace models check Qwen/Qwen3-0.6B")
def check(
    model: Annotated[str, typer.Argument(help="Folder, GGUF file, hub id, or headrace-demo.")],
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Number of ranks that the engine would have.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Check how engine and gateway would serve a model.

    It shows the implementation, quantisation, context, memory, tokenizer, chat template, and the
    formats of tool calls and reasoning. Names and shapes of all tensors are compared with
    config.json; weights are not read. For a hub id that is not cached, only the small files are
    fetched. Exit code 1: it cannot be served.
    """
    need("up", "huggingface_hub", "torch", "fastapi")
    from ..models.check import run_check

    raise typer.Exit(0 if run_check(model, tensor_parallel_size, Output(as_json)) else 1)


@app.command(epilog="Example: headrace models pull Qwen/Qwen3-0.6B")
def pull(
    model: Annotated[str, typer.Argument(help="Hub id.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Download a model from the hub into the local cache, and print its folder.

    An interrupted pull continues where it stopped.
    """
    need("gateway", "huggingface_hub")
    from ..models.pull import run_pull

    run_pull(model, revision, Output(as_json))
