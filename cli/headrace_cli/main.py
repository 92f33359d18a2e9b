"""The `headrace` command: parses arguments, calls one function per command, prints errors.

Heavy imports stay inside the commands, so that `--help` and `--version` are instant.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from headrace_common.text.checkpoint import DEMO_MODEL

from .commands import adapters as adapters_commands
from .commands import bench as bench_commands
from .commands import debug as debug_commands
from .commands import demo as demo_commands
from .commands import keys as keys_commands
from .commands import models as models_commands
from .commands import queues as queue_commands
from .commands import redis as redis_commands
from .commands import sealing as sealing_commands
from .commands import top as top_commands
from .commands import usage as usage_commands
from .commands.running_options import ApiKey, ApiUrl, DataFolder, ModelName
from .commands.up_command import HELP, UpCommand, passed_on, process_words
from .errors import CliError, UsageError
from .extras import need
from .running import DATA_DIR, api_url
from .tables import without_controls

app = typer.Typer(
    rich_markup_mode="markdown",
    name="headrace",
    help="Serves large language models: OpenAI API, durable queue, continuous batching.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.add_typer(bench_commands.app)
app.add_typer(top_commands.app)
app.add_typer(demo_commands.app)
app.add_typer(models_commands.app)
app.add_typer(keys_commands.app)
app.add_typer(queue_commands.app)
app.add_typer(usage_commands.app)
app.add_typer(sealing_commands.app)
app.add_typer(redis_commands.app)
app.add_typer(adapters_commands.app)
app.add_typer(debug_commands.app)

_SERVES = "`headrace up --model MODEL` serves a model"
_ELSEWHERE = {
    "run": _SERVES,
    "start": _SERVES,
    "operator": "`python -m headrace_operator` runs the operator",
}
_UP = {"allow_extra_args": True, "ignore_unknown_options": True}
_PASS_THROUGH = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def main() -> None:
    """Entry point. Errors that the user can fix are one message and exit code 1 (usage: 2)."""
    try:
        _check_command(sys.argv[1:])
        app()
    except CliError as error:
        text = without_controls(f"error: {error}")
        Console(stderr=True).print(text, style="red", markup=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)


def _check_command(arguments: list[str]) -> None:
    """Raises UsageError for a command's name in other tools, with the name that it has here."""
    if arguments and (remedy := _ELSEWHERE.get(arguments[0])):
        raise UsageError(f"there is no command {arguments[0]!r}", remedy)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options before the command."""


@app.command(
    cls=UpCommand,
    context_settings=_UP,
    epilog="Example: headrace up --model Qwen/Qwen3-0.6B --engines 2 --dtype bfloat16",
)
def up(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="Folder, GGUF file, hub id, or the bundled demo model.")
    ] = DEMO_MODEL,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that clients use; default: the model's last part.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address of the API.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the API.")] = 8000,
    engines: Annotated[int, typer.Option(min=1, help="Engine processes.")] = 1,
    gateways: Annotated[int, typer.Option(min=1, help="Gateway processes.")] = 1,
    redis: Annotated[
        str | None,
        typer.Option(envvar="REDIS_URL", help="Use this Redis or Valkey instead of starting one."),
    ] = None,
    data_dir: Annotated[Path, typer.Option(help="Queue data and logs.")] = DATA_DIR,
    sealing_keys_file: Annotated[
        Path | None,
        typer.Option(help="File of keys that encrypt prompts and answers in the queue's data."),
    ] = None,
    drain_timeout: Annotated[
        float,
        typer.Option(min=0, help="Seconds in which running requests may finish after Ctrl-C."),
    ] = 30.0,
    config_file: Annotated[  # UpCommand reads it
        Path | None,
        typer.Option("--config", help="YAML file of flags without their dashes, in vLLM's form."),
    ] = None,
) -> None:
    """Serve a model on this machine: starts a queue, engines and gateways.

    It also takes the flags of `headrace engine` and `headrace gateway`, and those of vLLM, and
    passes each to the processes that have it.
    """
    import asyncio
    from dataclasses import replace

    need("engine", "torch", "transformers")
    need("gateway", "fastapi", "uvicorn")
    need("up", "httpx")
    from .datadir import DataDir
    from .doctor.checks.model import refuse_unusable
    from .flags.assignment import assigned
    from .processes.report import TerminalReport
    from .up.stack import UpConfig
    from .up.up import Up, run_up

    config = UpConfig(
        model=model,
        served_model_name=served_model_name,
        host=host,
        port=port,
        engines=engines,
        gateways=gateways,
        sealing_keys_file=sealing_keys_file,
        drain_timeout=drain_timeout,
    )
    config = replace(config, arguments=assigned(passed_on(context), config.flags))
    refuse_unusable(model)

    async def run(report: TerminalReport, data: DataDir) -> int:
        return await run_up(Up(config, data=data, report=report, redis_url=redis))

    with DataDir(data_dir) as data, TerminalReport(Console()) as report:
        code = asyncio.run(run(report, data))
    raise typer.Exit(code)


app.command(
    "serve",
    cls=UpCommand,
    context_settings=_UP,
    help="The same as `headrace up`, with the model as its first argument, as in vLLM.",
    epilog="Example: headrace serve Qwen/Qwen3-0.6B --max-model-len 4k",
)(up)


@app.command(
    context_settings=_PASS_THROUGH,
    epilog="Example: headrace gateway --redis-url redis://queue:6379/0 --host 0.0.0.0",
)
def gateway(context: typer.Context) -> None:
    """Run one gateway; `headrace gateway --help` lists its settings."""
    _become_process("gateway", context.args, "fastapi", "uvicorn")


@app.command(
    context_settings=_PASS_THROUGH,
    epilog="Example: headrace engine --redis-url redis://queue:6379/0 --model Qwen/Qwen3-0.6B",
)
def engine(context: typer.Context) -> None:
    """Run one engine; `headrace engine --help` lists its settings."""
    _become_process("engine", context.args, "torch", "transformers")


@app.command(
    context_settings=_PASS_THROUGH, epilog="Example: headrace simulate --days 0.5 --plot day.png"
)
def simulate(context: typer.Context) -> None:
    """Simulate autoscaling on a trace of requests; `headrace simulate --help` lists its options."""
    _become("headrace_operator.simulation", context.args, "simulate", "numpy")


def _become_process(process: str, args: list[str], *packages: str) -> NoReturn:
    """Becomes an engine or a gateway; prints its help here, since its imports take seconds."""
    words = process_words(process, args)
    if words == [HELP]:
        from .flags.process_settings import Process, ProcessSettings

        ProcessSettings(Process(process)).print_help()
    _become(f"headrace_{process}", words, process, *packages)


def _become(module: str, args: list[str], extra: str, *packages: str) -> NoReturn:
    need(extra, *packages)
    os.execv(sys.executable, [sys.executable, "-m", module, *args])  # noqa: S606


@app.command(epilog="Example: headrace chat --model headrace-demo --once 'Tell me a story.'")
def chat(
    url: ApiUrl = None,
    data_dir: DataFolder = DATA_DIR,
    model: ModelName = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    api_key: ApiKey = None,
    once: Annotated[
        str | None, typer.Option(help="Send one message, print the answer and exit.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Largest number of tokens in an answer.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")
    ] = None,
    history: Annotated[
        bool,
        typer.Option(help="Save what you type, so that the arrow keys find it in later chats."),
    ] = True,
) -> None:
    """Chat with a served model in the terminal."""
    need("up", "httpx")
    from .chat.chat import ChatConfig, run_chat
    from .chat.input import history_file

    config = ChatConfig(
        url=api_url(url, data_dir).rstrip("/"),
        model=model,
        system=system,
        api_key=api_key,
        max_tokens=max_tokens,
        temperature=temperature,
    )
    run_chat(config, once, history_file() if history else None)


@app.command(epilog="Example: headrace doctor --model Qwen/Qwen3-0.6B")
def doctor(
    model: Annotated[
        str, typer.Option(help="Folder, GGUF file, hub id, or the bundled demo model.")
    ] = DEMO_MODEL,
    host: Annotated[str, typer.Option(help="Address of the API.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the API.")] = 8000,
    redis: Annotated[
        str | None, typer.Option(envvar="REDIS_URL", help="Redis or Valkey that will be used.")
    ] = None,
    data_dir: Annotated[Path, typer.Option(help="Queue data and logs.")] = DATA_DIR,
    engine: Annotated[
        bool,
        typer.Option(
            "--engine", help="Check only what an engine needs, by its environment variables."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check whether this machine can serve a model, and say what to fix."""
    from .doctor.doctor import DoctorConfig, run_doctor

    if engine:
        model = os.environ.get("HEADRACE_ENGINE_MODEL", model)
        redis = os.environ.get("HEADRACE_ENGINE_REDIS_URL", redis)
    config = DoctorConfig(
        model=model, host=host, port=port, redis_url=redis, data_dir=data_dir, engine=engine
    )
    healthy = run_doctor(config, Console(), as_json=as_json)
    raise typer.Exit(0 if healthy else 1)
