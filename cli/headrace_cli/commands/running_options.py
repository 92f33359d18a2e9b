"""Options with which commands find the running system."""

from pathlib import Path
from typing import Annotated

import typer

from ..running import DEFAULT_URL

DataFolder = Annotated[Path, typer.Option("--data-dir", help="The data folder of `headrace up`.")]
ApiUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="OPENAI_BASE_URL",
        help=f"URL of an OpenAI API; default: a running `headrace up`, else {DEFAULT_URL}/v1.",
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option("--model", help="Name of the model; default: the first that is served."),
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="OPENAI_API_KEY", help="API key, sent as a bearer token."),
]
