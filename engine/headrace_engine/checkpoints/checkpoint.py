"""A model's folder or GGUF file: finds it, reads its JSON files or metadata, and refuses what must
not be loaded.

Runs no code of a checkpoint and unpickles nothing. Other modules interpret the fields for an
architecture.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_common.text.checkpoint import MODEL_FILES, is_cross_encoder
from headrace_common.text.errors import TokenizerError
from headrace_common.text.gguf.files import find_gguf, is_gguf, read_gguf_configs
from headrace_common.text.gguf.hub import fetch, fetch_only, hub_file
from headrace_common.text.late_interaction import token_vector_size

from ..core.errors import CheckpointError, CheckpointNotFound, ConfigError

JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder with its parsed JSON files. Instead of a folder it may be a GGUF file, whose
    metadata says the same."""

    folder: Path
    config: JsonObject
    generation_config: JsonObject

    @property
    def is_gguf(self) -> bool:
        return is_gguf(self.folder)

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise ConfigError(
                f"{self.folder / 'config.json'}: architectures must be a list with a class name, "
                f"not {names!r:.60}"
            )
        return names[0]

    @property
    def has_no_head(self) -> bool:
        """Whether the checkpoint was saved without its head, as classes named ...Model are.

        GPT-2's class with a head is named ...LMHeadModel.
        """
        return self.architecture.endswith("Model") and not self.architecture.endswith("LMHeadModel")

    @property
    def scores_pairs(self) -> bool:
        """Whether the checkpoint is a cross-encoder: a classifier with a single label."""
        return is_cross_encoder(self.config)

    @property
    def token_vector_size(self) -> int | None:
        """How many numbers the vector of each token has in a model of late interaction; None for
        another kind of model."""
        try:
            return token_vector_size(self.config)
        except TokenizerError as error:
            raise ConfigError(f"{self.folder}/{error}") from error

    @property
    def dtype_name(self) -> str | None:
        """The dtype that config.json states, under its new or its old name."""
        name = self.config.get("dtype") or self.config.get("torch_dtype")
        return name.removeprefix("torch.") if isinstance(name, str) else None

    @property
    def quantization_config(self) -> JsonObject:
        """How weights are quantised; empty if they are not. Some multimodal checkpoints say it in
        their decoder's part of config.json (Kimi K2.5)."""
        text = self.config.get("text_config")
        parts = (self.config, text if isinstance(text, dict) else {})
        stored = [part["quantization_config"] for part in parts if part.get("quantization_config")]
        found: object = stored[0] if stored else {}
        if not isinstance(found, dict):
            raise ConfigError(
                f"{self.folder / 'config.json'}: quantization_config must be an object, not "
                f"{found!r:.80}"
            )
        return found

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of both files, generation_config.json's first, without duplicates."""
        found: dict[int, None] = {}
        for source in (self.generation_config, self.config):
            found.update(dict.fromkeys(_token_ids(source.get("eos_token_id"))))
        return tuple(found)


def load_checkpoint(model: str, revision: str | None = None) -> Checkpoint:
    """Opens a folder, a GGUF file or a hub id.

    Raises CheckpointError for a file that is missing or broken.
    """
    try:
        folder = _find_folder(model, revision)
        file = folder if is_gguf(folder) else find_gguf(folder)
        if file is not None:
            _, config, generation_config = read_gguf_configs(file)
            return Checkpoint(file, config, generation_config)
    except TokenizerError as error:
        raise CheckpointError(str(error)) from error
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    return Checkpoint(folder, config, read_json(generation) if generation.is_file() else {})


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object. Raises CheckpointError naming the file."""
    content = _load_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Reads a JSON file that holds a list of objects. Raises CheckpointError naming the file."""
    content = _load_json(path)
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise CheckpointError(f"{path} must hold a list of JSON objects")
    return content


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: is its folder a checkpoint?") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _find_folder(model: str, revision: str | None) -> Path:
    folder = Path(model).expanduser()
    if folder.is_dir() or is_gguf(folder):
        return folder
    is_path = folder.exists() or model.startswith((".", "/", "~"))
    if is_path or (model.count("/") > 1 and hub_file(model) is None):
        raise CheckpointNotFound(
            f"model {model!r} is not a folder: give the folder of a checkpoint, a GGUF file, or a "
            "hub id"
        )
    with _hub_errors(model):
        return _fetch(model, revision)


def _fetch(model: str, revision: str | None) -> Path:
    """Fetches a hub id's checkpoint, or the GGUF file that is named or the only one."""
    named = hub_file(model)
    if named is not None:
        return fetch(*named, revision)
    folder = download(model, revision, MODEL_FILES)
    if any(folder.glob("*.safetensors")) or find_gguf(folder) is not None:
        return folder
    return fetch_only(model, revision) or folder


def download(model: str, revision: str | None, files: Sequence[str]) -> Path:
    """Fetches files of a hub id into the local cache, and returns their folder.

    Raises CheckpointError.
    """
    with _hub_errors(model):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, allow_patterns=list(files)))


@contextmanager
def _hub_errors(model: str) -> Iterator[None]:
    """Raises CheckpointError in place of the errors of the hub's client."""
    try:
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ImportError as error:
        raise CheckpointError(
            f"model {model!r} is not a folder, and a hub id needs the package huggingface_hub"
        ) from error
    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointNotFound(
            f"model {model!r} is neither a folder nor can it be fetched from the hub: {error}"
        ) from error


def _token_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]
