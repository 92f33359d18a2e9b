"""A checkpoint's small files: where they are, and their contents.

In a folder, a hub repository that is fetched on demand, or the bundled demo model. Only tokenizer
and configuration files: weights are the engine's business.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from .errors import HeadraceError

DEMO_MODEL = "headrace-demo"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    CHAT_TEMPLATE_FILE,
    "chat_template.json",
)
# All of them together. The largest tokenizers of open models have 35 MB.
MAX_FILES_BYTES = 128 * 2**20


class TokenizerError(HeadraceError):
    """A tokenizer's file is missing or cannot be read; the message names it."""

    code = "tokenizer_invalid"


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Contents of TOKENIZER_FILES by name, as far as they exist; `origin` is for messages."""

    origin: str
    contents: Mapping[str, bytes]

    def json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file, empty where there is no file. Raises TokenizerError."""
        if name not in self.contents:
            return {}
        try:
            content = json.loads(self.contents[name])
        except (ValueError, RecursionError) as error:
            raise TokenizerError(f"{self.origin}/{name}: {error}") from error
        if not isinstance(content, dict):
            kind = type(content).__name__
            raise TokenizerError(f"{self.origin}/{name}: must hold a JSON object, not {kind}")
        return content

    def text(self, name: str) -> str | None:
        """A text file, None where there is none. Raises TokenizerError."""
        if name not in self.contents:
            return None
        try:
            return self.contents[name].decode()
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{self.origin}/{name}: {error}") from error

    def with_chat_template(self, text: bytes) -> "CheckpointFiles":
        """These files with another chat template: its own file comes before all other places."""
        return CheckpointFiles(self.origin, {**self.contents, CHAT_TEMPLATE_FILE: text})


def read_files(source: str | Path, revision: str | None = None) -> CheckpointFiles:
    """Reads what `resolve` finds. Raises TokenizerError, also where it is over MAX_FILES_BYTES."""
    folder = resolve(source, revision)
    paths = [path for name in TOKENIZER_FILES if (path := folder / name).is_file()]
    try:
        size = sum(path.stat().st_size for path in paths)
        if size > MAX_FILES_BYTES:
            raise TokenizerError(
                f"{folder}: its tokenizer and configuration files have {size} bytes, over the "
                f"limit of {MAX_FILES_BYTES}"
            )
        contents = {path.name: path.read_bytes() for path in paths}
    except OSError as error:
        raise TokenizerError(f"{folder}: {error}") from error
    return CheckpointFiles(str(folder), contents)


def resolve(source: str | Path, revision: str | None = None) -> Path:
    """The folder that holds the tokenizer's files, downloaded first where `source` is a hub id.

    DEMO_MODEL is the bundled model's name. Raises TokenizerError where there is no such folder and
    the hub has no such repository.
    """
    folder = Path(local_source(str(source))).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or str(source).startswith((".", "~")) or str(source).count("/") > 1:
        raise TokenizerError(f"{source}: no such folder")
    return _download(str(source), revision)


def local_source(source: str) -> str:
    """The bundled demo model's folder for its name; any other source as it is."""
    return str(demo_folder()) if source == DEMO_MODEL else source


def demo_folder() -> Path:
    """The folder of the model that is part of the package."""
    return Path(str(files("headrace_common") / "demo_model"))


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
