"""The arguments of `headrace usage report|export`."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from ..running import DATA_DIR
from .queues import Models, Url, queue_session
from .running_options import DataFolder

app = typer.Typer(
    rich_markup_mode="markdown",
    name="usage",
    help="Report or export what requests used, by key, tenant and model.",
    no_args_is_help=True,
)

_BY = ("day", "key", "tenant", "model", "adapter", "outcome")


@app.command(epilog="Example: headrace usage report --since 30d --by day,tenant --format csv")
def report(
    since: Annotated[
        str, typer.Option(help="Start of the report: 24h, 7d, or a day or time (ISO 8601, UTC).")
    ] = "7d",
    by: Annotated[
        str, typer.Option(help=f"What to sum by, separated by commas: {', '.join(_BY)}.")
    ] = "day,tenant,model",
    entries: Annotated[
        bool, typer.Option("--entries", help="One row for each entry instead of sums.")
    ] = False,
    form: Annotated[
        str, typer.Option("--format", help="table, csv, json or parquet (needs pyarrow).")
    ] = "table",
    output: Annotated[
        Path | None, typer.Option(help="File to write; default: standard output.")
    ] = None,
    model: Models = None,
    redis: Url = None,
    data_dir: DataFolder = DATA_DIR,
) -> None:
    """Sum what requests used: tokens, engine seconds, KV byte-seconds."""
    from datetime import UTC, datetime

    from ..queues.usage_report import FORMATS, ReportOptions
    from ..queues.usage_report import report as run
    from ..queues.usage_report import since as read_since

    if form not in FORMATS:
        raise UsageError(f"--format {form!r} is unknown", f"use {', '.join(FORMATS)}")
    names = () if entries else tuple(filter(None, by.split(",")))
    if unknown := [name for name in names if name not in _BY]:
        raise UsageError(f"--by {unknown[0]!r} is unknown", f"use {', '.join(_BY)}")
    options = ReportOptions(names, read_since(since, datetime.now(UTC)), form, output, model)
    run(queue_session(redis, data_dir), options)


@app.command(
    epilog="Example: headrace usage export --to https://openmeter.example.com/api/v1/events"
)
def export(
    to: Annotated[
        str,
        typer.Option(
            envvar="HEADRACE_USAGE_EXPORT_TO", help="URL that takes batches of CloudEvents."
        ),
    ],
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="HEADRACE_USAGE_EXPORT_TOKEN_FILE", help="File with the bearer token to send."
        ),
    ] = None,
    group: Annotated[
        str, typer.Option(help="Group that remembers what was sent; one exporter for each.")
    ] = "export",
    source: Annotated[
        str, typer.Option(envvar="HEADRACE_USAGE_EXPORT_SOURCE", help="The events' source.")
    ] = "headrace",
    event_type: Annotated[str, typer.Option(help="The events' type.")] = "headrace.request",
    batch: Annotated[
        int, typer.Option(min=1, max=1000, help="Most entries of each ledger in one batch.")
    ] = 100,
    interval: Annotated[
        float, typer.Option(min=0.05, help="Seconds until the next look at an empty ledger.")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="End when all entries have been sent.")
    ] = False,
    model: Models = None,
    redis: Url = None,
    data_dir: DataFolder = DATA_DIR,
) -> None:
    """Send usage as CloudEvents over HTTP, in the form of OpenMeter; each entry at least once."""
    from ..queues.usage_export import ExportOptions
    from ..queues.usage_export import export as run

    if not to.startswith(("http://", "https://")):
        raise UsageError(f"--to {to!r} is no URL", "write http://... or https://...")
    token = None
    if token_file is not None:
        try:
            token = token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{token_file} cannot be read", str(error)) from error
    options = ExportOptions(
        url=to,
        group=group,
        models=model,
        most=batch,
        interval=interval,
        source=source,
        event_type=event_type,
        token=token,
        once=once,
    )
    run(queue_session(redis, data_dir), options)
