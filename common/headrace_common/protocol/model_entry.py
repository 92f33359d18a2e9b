"""A registered model as bytes: its entry, and its files compressed."""

import zlib
from dataclasses import asdict, fields
from typing import Any

import msgpack

from ..checkpoint import MAX_FILES_BYTES
from .registry import Files, RegisteredModel, RegistryError, digest_of

MAX_NAME_BYTES = 2048
MAX_ENTRY_BYTES = 65536
MAX_PACKED_BYTES = MAX_FILES_BYTES + 4096  # with their names
_FIELDS = {f.name: f.type for f in fields(RegisteredModel) if f.name != "adapters"}


def encode_entry(model: RegisteredModel) -> bytes:
    """Packs an entry as a map of its fields. Raises RegistryError where its name is too long, or
    its adapters are too many."""
    if not 0 < len(model.name.encode()) <= MAX_NAME_BYTES:
        raise RegistryError(
            f"model name {model.name[:80]!r}: must have 1 to {MAX_NAME_BYTES} bytes"
        )
    data: bytes = msgpack.packb(asdict(model))
    if len(data) > MAX_ENTRY_BYTES:
        raise RegistryError(
            f"model {model.name[:80]!r}: the names of its {len(model.adapters)} adapters come to "
            f"more than {MAX_ENTRY_BYTES} bytes"
        )
    return data


def decode_entry(data: bytes) -> RegisteredModel:
    """Unpacks and checks an entry; unknown fields are ignored. Raises RegistryError."""
    body = _unpacked(data, MAX_ENTRY_BYTES)
    for name, kind in _FIELDS.items():
        if type(body.get(name)) is not kind:
            raise RegistryError(f"model entry: {name} is missing or of another type")
    adapters = body.get("adapters", [])  # absent before there were any
    if not isinstance(adapters, list) or not all(isinstance(name, str) for name in adapters):
        raise RegistryError("model entry: adapters must be names")
    model = RegisteredModel(
        **{name: body[name] for name in _FIELDS}, adapters=tuple(filter(None, adapters))
    )
    if not model.name or model.max_model_len < 1:
        raise RegistryError("model entry: needs a name and a max_model_len of at least 1")
    return model


def encode_files(model: RegisteredModel, files: Files) -> bytes:
    """Packs and compresses files: CPU work for a thread. Raises RegistryError."""
    if digest_of(files) != model.digest:
        raise RegistryError(f"model {model.name!r}: the files are not those of its digest")
    data: bytes = msgpack.packb(dict(files))
    if len(data) > MAX_PACKED_BYTES:
        raise RegistryError(
            f"model {model.name!r}: its tokenizer and configuration files have {len(data)} bytes, "
            f"over the limit of {MAX_FILES_BYTES}"
        )
    return zlib.compress(data)


def decode_files(model: RegisteredModel, data: bytes) -> Files:
    """The files that `encode_files` packed: CPU work for a thread. Raises RegistryError."""
    files = _unpacked(_decompressed(model, data), MAX_PACKED_BYTES)
    if not all(isinstance(content, bytes) for content in files.values()):
        raise RegistryError(f"model {model.name!r}: its files are not bytes by name")
    if digest_of(files) != model.digest:
        raise RegistryError(f"model {model.name!r}: its files are not those of its entry")
    return files


def _decompressed(model: RegisteredModel, data: bytes) -> bytes:
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(data, MAX_PACKED_BYTES)
    except zlib.error as error:
        raise RegistryError(f"model {model.name!r}: its files are damaged: {error}") from error
    if not stream.eof:
        raise RegistryError(
            f"model {model.name!r}: its files are cut short, or over {MAX_FILES_BYTES} bytes"
        )
    return content


def _unpacked(data: bytes, limit: int) -> dict[str, Any]:
    if len(data) > limit:
        raise RegistryError(f"model entry of {len(data)} bytes is over {limit}")
    try:
        body = msgpack.unpackb(data, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RegistryError(f"model entry: not msgpack: {error}") from error
    if not isinstance(body, dict) or not all(isinstance(key, str) for key in body):
        raise RegistryError("model entry: must be a map by name")
    return body
