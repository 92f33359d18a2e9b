"""Finds GGUF files, and makes a published checkpoint's small files from the metadata of one."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import TokenizerError
from .config import make_config
from .header import Header, read_header
from .tokenizer import (
    check_vocabulary,
    make_generation_config,
    make_tokenizer,
    make_tokenizer_config,
)

SUFFIX = ".gguf"
# Vision encoders, and statistics for quantising, lie beside the models that they belong to.
_NO_MODEL = ("mmproj", "imatrix")


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()


def find_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder without safetensors; None if it has none.

    Raises TokenizerError if there are several.
    """
    if any(folder.glob("*.safetensors")):
        return None
    name = only_model(str(folder), [path.name for path in folder.glob(f"*{SUFFIX}")])
    return None if name is None else folder / name


def only_model(where: str, names: Iterable[str]) -> str | None:
    """The one of the names that is a model in GGUF; None if none is. Raises TokenizerError."""
    files = sorted(name for name in names if name.endswith(SUFFIX))
    found = [name for name in files if not any(part in name for part in _NO_MODEL)]
    if len(found) > 1:
        raise TokenizerError(
            f"{where} has {len(found)} GGUF files: name one of them, as in {where}/{found[0]}. "
            f"There are {', '.join(found)}"
        )
    return found[0] if found else None


def read_gguf_files(path: Path) -> dict[str, bytes]:
    """The small files that a published checkpoint of this model would have, by name.

    Raises TokenizerError for the first key that is missing, broken or not supported.
    """
    header = read_header(path)
    config, metadata = make_config(header), header.metadata
    check_vocabulary(metadata, config["vocab_size"])
    contents = {
        "config.json": config,
        "generation_config.json": make_generation_config(metadata),
        "tokenizer.json": make_tokenizer(metadata),
        "tokenizer_config.json": make_tokenizer_config(metadata),
    }
    return {name: _encoded(content) for name, content in contents.items()}


def read_gguf_configs(path: Path) -> tuple[Header, dict[str, Any], dict[str, Any]]:
    """The header, and the contents of config.json and generation_config.json."""
    header = read_header(path)
    return header, make_config(header), make_generation_config(header.metadata)


def _encoded(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()
