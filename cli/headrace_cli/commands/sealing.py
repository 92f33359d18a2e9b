"""The arguments of `headrace sealing create|add|use|remove|list|secret`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..tables import Output

if TYPE_CHECKING:
    from ..key_files.sealing import KeyringCommands

app = typer.Typer(
    rich_markup_mode="markdown",
    name="sealing",
    help="Manage the keys that encrypt prompts and answers in Redis.",
    no_args_is_help=True,
)

File = Annotated[
    Path,
    typer.Option(envvar="HEADRACE_GATEWAY_SEALING_KEYS_FILE", help="File of keys: keep it secret."),
]
KeyId = Annotated[str, typer.Argument(metavar="ID", help="Id of a key, see list.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(epilog="Example: headrace sealing create --file sealing.json")
def create(file: File, as_json: AsJson = False) -> None:
    """Create a file with one key."""
    _keyring(file, as_json).create()


@app.command(epilog="Example: headrace sealing add --file sealing.json")
def add(file: File, as_json: AsJson = False) -> None:
    """Add a key that opens sealed data; `use` makes it seal, too."""
    _keyring(file, as_json).add()


@app.command(epilog="Example: headrace sealing use 2026-11 --file sealing.json")
def use(key_id: KeyId, file: File, as_json: AsJson = False) -> None:
    """Seal with a key of the file from now on."""
    _keyring(file, as_json).use(key_id)


@app.command(epilog="Example: headrace sealing remove 2026-10 --file sealing.json")
def remove(key_id: KeyId, file: File, as_json: AsJson = False) -> None:
    """Remove a key: what it has sealed cannot be opened any more."""
    _keyring(file, as_json).remove(key_id)


@app.command(name="list", epilog="Example: headrace sealing list --file sealing.json")
def list_keys(file: File, as_json: AsJson = False) -> None:
    """List the ids of the keys; never a key."""
    _keyring(file, as_json).show()


@app.command(epilog="Example: headrace sealing secret headrace-sealing --file sealing.json")
def secret(
    name: Annotated[str, typer.Argument(help="Name of the Secret.")],
    file: File,
    namespace: Annotated[str | None, typer.Option(help="Namespace of the Secret.")] = None,
) -> None:
    """Print the file as a Secret, for kubectl apply -f -. It holds the keys."""
    _keyring(file).secret(name, namespace)


def _keyring(file: Path, as_json: bool = False) -> "KeyringCommands":
    from ..key_files.sealing import KeyringCommands

    return KeyringCommands(file, Output(as_json))
