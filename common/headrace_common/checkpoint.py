"""Where a checkpoint's small files are: a folder, or a hub repository fetched on demand.

Only tokenizer and configuration files: weights are the engine's business.
"""

import json
from pathlib import Path
from typing import Any

from .errors import HeadraceError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
    "chat_template.json",
)


class TokenizerError(HeadraceError):
    """A tokenizer's file is missing or cannot be read; the message names it."""

    code = "tokenizer_invalid"


def resolve(source: str | Path, revision: str | None = None) -> Path:
    """The folder that holds the tokenizer's files, downloaded first where `source` is a hub id.

    Raises TokenizerError where there is no such folder and the hub has no such repository.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or str(source).startswith((".", "~")) or str(source).count("/") > 1:
        raise TokenizerError(f"{source}: no such folder")
    return _download(str(source), revision)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no file. Raises TokenizerError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path}: must hold a JSON object, not {type(content).__name__}")
    return content


def _download(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(
            snapshot_download(repository, revision=revision, allow_patterns=list(TOKENIZER_FILES))
        )
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise TokenizerError(
            f"{repository}: neither a folder here nor a repository that the hub gives: {error}"
        ) from error


def default_name(model: str) -> str:
    """What clients call a model where no name is set: the folder's, or the hub id's last part."""
    return model.rstrip("/").rsplit("/", 1)[-1]
