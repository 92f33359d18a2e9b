"""The arguments of `headrace debug steps|requests|profile`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..errors import UsageError
from ..running import DATA_DIR, engine_url
from ..tables import Output, check_folder
from .running_options import DataFolder

if TYPE_CHECKING:
    from ..engine_inside import EngineInside

app = typer.Typer(
    rich_markup_mode="markdown",
    name="debug",
    help="Show the steps and requests inside a running engine, or record a profile.",
    no_args_is_help=True,
)

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="HEADRACE_ENGINE_METRICS_URL",
        help="URL of the engine's metrics port; default: that of a running `headrace up`.",
    ),
]
Engine = Annotated[
    str | None,
    typer.Option("--engine", help="Name of the engine, such as engine-1; default: the first."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(epilog="Example: headrace debug steps --last 50")
def steps(
    url: Url = None,
    data_dir: DataFolder = DATA_DIR,
    engine: Engine = None,
    last: Annotated[int, typer.Option(min=1, max=512, help="Number of steps.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the last steps: what each computed, how long it took, and what remained to do."""
    from ..engine_inside import show_steps

    show_steps(_inside(url, data_dir, engine), Output(as_json), last)


@app.command(epilog="Example: headrace debug requests --json")
def requests(
    url: Url = None,
    data_dir: DataFolder = DATA_DIR,
    engine: Engine = None,
    as_json: AsJson = False,
) -> None:
    """Show the requests of an engine, and the time since their last output."""
    from ..engine_inside import show_requests

    show_requests(_inside(url, data_dir, engine), Output(as_json))


@app.command(epilog="Example: headrace debug profile trace.json --steps 50")
def profile(
    file: Annotated[Path, typer.Argument(help="Where to write the Chrome trace.")],
    url: Url = None,
    data_dir: DataFolder = DATA_DIR,
    engine: Engine = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Number of steps to record.")] = 20,
    timeout: Annotated[int, typer.Option(min=1, max=300, help="Seconds to wait for them.")] = 60,
) -> None:
    """Record the next steps; open the file with chrome://tracing or Perfetto."""
    check_folder(file)
    trace = _inside(url, data_dir, engine).profile(steps, timeout)
    try:
        file.write_bytes(trace)
    except OSError as error:
        raise UsageError(
            f"cannot write {file} ({error.strerror})", "choose another file"
        ) from error
    Console(stderr=True).print(f"{file}: {steps} steps, {len(trace)} bytes", markup=False)


def _inside(url: str | None, data_dir: Path, engine: str | None) -> "EngineInside":
    from ..engine_inside import DEFAULT_URL, EngineInside

    return EngineInside(engine_url(url, data_dir, engine) or DEFAULT_URL)
