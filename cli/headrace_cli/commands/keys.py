"""The arguments of `headrace keys create|list|revoke`."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from ..tables import Output

app = typer.Typer(
    rich_markup_mode="markdown",
    name="keys",
    help="Create, list and revoke API keys, in a file or as a Kubernetes Secret.",
    no_args_is_help=True,
)

File = Annotated[
    Path | None,
    typer.Option(envvar="HEADRACE_GATEWAY_API_KEYS_FILE", help="File of keys (hashes only)."),
]
SecretName = Annotated[
    str | None,
    typer.Option(help="Print all keys as a Secret of this name, for kubectl apply -f -."),
]
Namespace = Annotated[str | None, typer.Option(help="Namespace of the Secret.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(
    epilog="Example: headrace keys create alice --file keys.yaml --tenant team-a --expires 90d"
)
def create(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Name of the key.")],
    file: File = None,
    tenant: Annotated[
        str,
        typer.Option(
            help="Tenant of the key; each tenant has its own cache, fair share and metrics."
        ),
    ] = "default",
    tenant_weight: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=100,
            help="Share of the tenant relative to others; default: as its other keys, or 1.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that it may use, repeatable; default: all.")
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Requests that it may send in a minute.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(min=1, help="Prompt and output tokens that it may use in a minute."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests that it may have at once.")
    ] = None,
    prompt_tokens_per_day: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens that it may use in a day (UTC).")
    ] = None,
    output_tokens_per_day: Annotated[
        int | None, typer.Option(min=1, help="Output tokens that it may use in a day (UTC).")
    ] = None,
    priority_ceiling: Annotated[
        int, typer.Option(help="Most urgent priority that it may ask for; lower is sooner.")
    ] = 0,
    admin: Annotated[
        bool, typer.Option("--admin", help="It may change what is served to all tenants.")
    ] = False,
    expires: Annotated[
        str | None,
        typer.Option(help="Time of expiry: 90d, 12h or 2027-01-31T12:00:00Z; default: never."),
    ] = None,
    secret: SecretName = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it; it cannot be shown again."""
    from headrace_common.config.api_keys import KeyLimits

    from ..key_files.keys import KeyRecords, KeyStorage, fields_of
    from ..key_files.keys import create as run

    now = datetime.now(UTC)
    limits = KeyLimits(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        concurrency=concurrency,
        prompt_tokens_per_day=prompt_tokens_per_day,
        output_tokens_per_day=output_tokens_per_day,
    )
    fields = fields_of(
        tenant=tenant,
        tenant_weight=tenant_weight,
        models=model or (),
        limits=limits,
        priority_ceiling=priority_ceiling,
        admin=admin,
        expires=expires,
        now=now,
    )
    storage = KeyStorage(file=file, secret=secret, namespace=namespace)
    run(KeyRecords(storage), key_id, fields, Output(as_json), now)


@app.command(name="list", epilog="Example: headrace keys list --file keys.yaml")
def list_keys(file: File = None, as_json: AsJson = False) -> None:
    """List the keys of a file."""
    from ..key_files.keys import KeyRecords, KeyStorage, show

    show(KeyRecords(KeyStorage(file=file)), Output(as_json), datetime.now(UTC))


@app.command(epilog="Example: headrace keys revoke alice --file keys.yaml")
def revoke(
    key_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Names of keys.")],
    file: File = None,
    secret: SecretName = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Remove keys; gateways refuse them within seconds."""
    from ..errors import UsageError
    from ..key_files.keys import KeyRecords, KeyStorage
    from ..key_files.keys import revoke as run

    if file is None:
        raise UsageError("no file of keys is given", "name it with --file")
    storage = KeyStorage(file=file, secret=secret, namespace=namespace)
    run(KeyRecords(storage), key_ids, Output(as_json))
