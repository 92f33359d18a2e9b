"""GGUF files on the hub: one of a repository's files, as ORG/NAME/FILE.gguf, or the only one of a
repository without safetensors. The functions raise the errors of the hub's client, too."""

import re
from pathlib import Path

from ..hub_errors import transport_errors
from .files import only_model

_FILE = re.compile(r"([\w.-]+/[\w.-]+)/([\w./-]+\.gguf)")


def hub_file(model: str) -> tuple[str, str] | None:
    """The repository and the file that `model` names; None if it is no such name."""
    found = None if model.startswith((".", "/", "~")) else _FILE.fullmatch(model)
    return None if found is None else (found[1], found[2])


def fetch(repository: str, file: str, revision: str | None) -> Path:
    """Downloads a file, if it is not cached."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repository, file, revision=revision))


def fetch_only(repository: str, revision: str | None) -> Path | None:
    """Downloads the only GGUF file of a repository without safetensors; None if it has none, or if
    the hub cannot be asked. Raises TokenizerError if there are several."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    unreachable: tuple[type[Exception], ...] = (HfHubHTTPError, *transport_errors())
    try:
        names = HfApi().list_repo_files(repository, revision=revision)
    except unreachable:
        return None
    if any(name.endswith(".safetensors") for name in names):
        return None
    only = only_model(repository, names)
    return None if only is None else fetch(repository, only, revision)
