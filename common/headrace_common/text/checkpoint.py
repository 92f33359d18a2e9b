"""Finds and reads a checkpoint's small files: tokenizer and configuration, no weights.

They are in a folder, in a hub repository that is downloaded on demand, or in one of the bundled
demo models. A GGUF file has the same in its metadata.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from .errors import HubUnreachable, ModelNotFound, TokenizerError
from .gguf.files import SUFFIX, find_gguf, is_gguf, read_gguf_files
from .gguf.hub import fetch, fetch_only, hub_file

DEMO_MODEL = "headrace-demo"
DEMO_EMBEDDINGS, DEMO_VISION = f"{DEMO_MODEL}-embeddings", f"{DEMO_MODEL}-vision"
# Folders of the models that are part of the package.
_BUNDLED = {
    DEMO_MODEL: "demo_model",
    DEMO_EMBEDDINGS: "demo_embeddings",
    DEMO_VISION: "demo_vision",
}
CHAT_TEMPLATE_FILE = "chat_template.jinja"
# How images become patches; the second is the older form.
PROCESSOR_FILE, PREPROCESSOR_FILE = "processor_config.json", "preprocessor_config.json"
VIDEO_PREPROCESSOR_FILE = "video_preprocessor_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    CHAT_TEMPLATE_FILE,
    "chat_template.json",
    PROCESSOR_FILE,
    PREPROCESSOR_FILE,
    VIDEO_PREPROCESSOR_FILE,
)
# The files that engines read and a download fetches: no pickles, no code.
MODEL_FILES = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt")
# All TOKENIZER_FILES together. The largest tokenizers of open models have 35 MB.
MAX_FILES_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Contents of those TOKENIZER_FILES that exist, by name; `origin` is for messages."""

    origin: str
    contents: Mapping[str, bytes]

    def json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file; empty if there is no file. Raises TokenizerError."""
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
        """A text file; None if there is none. Raises TokenizerError."""
        if name not in self.contents:
            return None
        try:
            return self.contents[name].decode()
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{self.origin}/{name}: {error}") from error

    def with_chat_template(self, text: bytes) -> "CheckpointFiles":
        """Returns these files with another chat template, in the file that has precedence."""
        return CheckpointFiles(self.origin, {**self.contents, CHAT_TEMPLATE_FILE: text})


def read_files(source: str | Path, revision: str | None = None) -> CheckpointFiles:
    """Reads the files that `resolve` finds; those of a GGUF file are made from its metadata.

    Raises TokenizerError, also above MAX_FILES_BYTES.
    """
    found = resolve(source, revision)
    if is_gguf(found):
        contents = read_gguf_files(found)
        _check_size(found, sum(map(len, contents.values())))
        return CheckpointFiles(str(found), contents)
    paths = [path for name in TOKENIZER_FILES if (path := found / name).is_file()]
    try:
        _check_size(found, sum(path.stat().st_size for path in paths))
        contents = {path.name: path.read_bytes() for path in paths}
    except OSError as error:
        raise TokenizerError(f"{found}: {error}") from error
    return CheckpointFiles(str(found), contents)


def _check_size(found: Path, size: int) -> None:
    if size > MAX_FILES_BYTES:
        raise TokenizerError(
            f"{found}: its tokenizer and configuration files have {size} bytes, over the limit of "
            f"{MAX_FILES_BYTES}"
        )


def resolve(source: str | Path, revision: str | None = None) -> Path:
    """The folder with the tokenizer's files, or the model's GGUF file; they are downloaded first if
    `source` is a hub id, or names a GGUF file of one (ORG/NAME/FILE.gguf).

    DEMO_MODEL, DEMO_EMBEDDINGS and DEMO_VISION are the bundled models' names. Raises ModelNotFound
    if there is no such folder or hub repository, HubUnreachable if the hub cannot be reached,
    TokenizerError if a folder has several models.
    """
    path = Path(local_source(str(source))).expanduser()
    if path.is_dir():
        return find_gguf(path) or path
    if is_gguf(path):
        return path
    is_path = path.is_absolute() or str(source).startswith((".", "~"))
    if is_path or (str(source).count("/") > 1 and hub_file(str(source)) is None):
        raise ModelNotFound(f"{source}: no such folder or GGUF file")
    return _download(str(source), revision)


def local_source(source: str) -> str:
    """A bundled model's folder for its name; any other source unchanged."""
    return str(demo_folder(source)) if source in _BUNDLED else source


def demo_folder(model: str = DEMO_MODEL) -> Path:
    """The folder of a model that is part of the package."""
    return Path(str(files("headrace_common") / _BUNDLED[model]))


def _download(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        named = hub_file(repository)
        if named is not None:
            return fetch(*named, revision)
        folder = Path(
            snapshot_download(repository, revision=revision, allow_patterns=list(TOKENIZER_FILES))
        )
        if (folder / "tokenizer.json").is_file():
            return folder
        return find_gguf(folder) or fetch_only(repository, revision) or folder
    except (
        HFValidationError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    ) as error:
        raise ModelNotFound(
            f"{repository}: neither a folder here nor a repository that the hub gives: "
            f"{_sentence(error)}"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise HubUnreachable(
            f"{repository}: no folder here, and the hub could not be asked for it: "
            f"{_sentence(error)}"
        ) from error


def _sentence(error: Exception) -> str:
    """The first line of an error of the hub's client, without its advice and links."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def default_name(model: str) -> str:
    """A model's default name for clients: that of the folder or GGUF file, or the hub id's last
    part."""
    return model.rstrip("/").rsplit("/", 1)[-1].removesuffix(SUFFIX)


def is_cross_encoder(config: Mapping[str, Any]) -> bool:
    """Whether config.json describes a cross-encoder: a classifier of texts with a single label."""
    names, labels = config.get("architectures"), config.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else config.get("num_labels")
    name = names[0] if isinstance(names, list) and names else None
    return count == 1 and isinstance(name, str) and name.endswith("ForSequenceClassification")


def base_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json about the decoder and the vision tower: models that add a layer to
    another model have that one's fields in `vlm_config`."""
    inner = config.get("vlm_config")
    return inner if isinstance(inner, Mapping) else config
