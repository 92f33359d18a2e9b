"""`headrace models pull`: fetches a hub id into the cache of huggingface-hub.

What was fetched before an interruption is kept, and the next pull continues from there.
"""

import os
import sys
from fnmatch import fnmatch
from pathlib import Path

from headrace_common.text.checkpoint import MODEL_FILES
from headrace_common.text.gguf.hub import fetch, hub_file
from headrace_common.text.hub_errors import transport_errors

from ..errors import CliError, UsageError
from ..tables import Output

_HUB_SECONDS = 10.0


def run_pull(model: str, revision: str | None, output: Output) -> None:
    """Fetches what engines and gateways read. Raises CliError."""
    if Path(model).expanduser().exists():
        raise UsageError(f"{model} is a folder on this machine", "a hub id is pulled: ORG/NAME")
    bars_on_a_terminal_alone()
    folder = _fetch(model, revision)
    paths = [folder] if folder.is_file() else folder.rglob("*")
    size = sum(path.stat().st_size for path in paths if path.is_file())
    output.show_line({"model": model, "folder": str(folder), "bytes": size}, str(folder))


def bars_on_a_terminal_alone() -> None:
    """Shows progress bars only on a terminal.

    Call it before the first import of huggingface_hub, which then reads the variable.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _fetch(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    unreachable: tuple[type[Exception], ...] = (LocalEntryNotFoundError, *transport_errors())
    named = hub_file(model)
    try:
        if named is not None:
            return fetch(*named, revision)
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(MODEL_FILES)))
    except GatedRepoError as error:
        raise CliError(
            f"{model} is gated: accept its terms on its page of the hub, and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise CliError(f"the hub has no {model}, or HF_TOKEN may not read it") from error
    except RevisionNotFoundError as error:
        raise CliError(f"{model} has no revision {revision}") from error
    except HFValidationError as error:
        raise UsageError(f"{model!r} is not a hub id", "as Qwen/Qwen3-0.6B") from error
    except unreachable as error:
        raise CliError(
            f"{model}: the hub cannot be reached ({_root(error)}): check the network and "
            "HF_ENDPOINT; what was fetched is kept"
        ) from error


def hub_bytes(model: str) -> int | None:
    """The size of a repository's weights, according to the hub; None if it does not say."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    silent: tuple[type[Exception], ...] = (
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        *transport_errors(),
    )
    try:
        info = HfApi().model_info(model, timeout=_HUB_SECONDS, files_metadata=True)
    except silent:
        return None
    files = info.siblings or []
    return sum(file.size or 0 for file in files if fnmatch(file.rfilename, "*.safetensors")) or None


def _root(error: BaseException) -> str:
    """The type of the first error, which the hub's client wraps in others."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return type(error).__name__
