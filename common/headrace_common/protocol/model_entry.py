"""A registered model as bytes: its entry, and its files compressed."""

import re
import zlib
from dataclasses import asdict, fields, replace
from typing import Any

import msgpack

from ..text.checkpoint import MAX_FILES_BYTES
from .registry import Files, RegisteredModel, RegistrationGrant, RegistryError, digest_of

MAX_NAME_BYTES = 2048
MAX_ENTRY_BYTES = 65536
MAX_PACKED_BYTES = MAX_FILES_BYTES + 4096  # including their names
MOST_TOKENS = 2**31  # and Unix seconds, bounds of an entry's numbers
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LATER = ("adapters", "holds", "images")  # entries of older versions have no such field
_FIELDS = {f.name: f.type for f in fields(RegisteredModel) if f.name not in _LATER}


def encode_entry(model: RegisteredModel) -> bytes:
    """Packs an entry as a map of its fields.

    Raises RegistryError if its name is too long or it has too many adapters.
    """
    if not 0 < len(model.name.encode()) <= MAX_NAME_BYTES:
        raise RegistryError(
            f"model name {model.name[:80]!r}: must have 1 to {MAX_NAME_BYTES} bytes"
        )
    body = asdict(model)
    for name in ("holds", "images"):
        if not body[name]:
            del body[name]
    data: bytes = msgpack.packb(body)
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
    adapters = body.get("adapters", [])
    if not isinstance(adapters, list) or not all(isinstance(name, str) for name in adapters):
        raise RegistryError("model entry: adapters must be names")
    model = RegisteredModel(
        **{name: body[name] for name in _FIELDS},
        adapters=tuple(filter(None, adapters)),
        holds=body.get("holds") is True,
        images=body.get("images") is True,
    )
    if not model.name or not 0 < model.max_model_len < MOST_TOKENS:
        raise RegistryError(
            f"model entry: needs a name and a max_model_len from 1 to {MOST_TOKENS - 1}"
        )
    if _DIGEST.fullmatch(model.digest) is None:
        raise RegistryError("model entry: digest must be a SHA-256 in hexadecimal digits")
    if not 0 <= model.created < 2**53:
        raise RegistryError("model entry: created must be Unix seconds")
    return model


def encode_grant(grant: RegistrationGrant) -> bytes:
    """Packs a grant. Raises RegistryError if it has too many adapters."""
    data: bytes = msgpack.packb(asdict(grant))
    if len(data) > MAX_ENTRY_BYTES:
        raise RegistryError(f"the names of {len(grant.adapters)} adapters are too long")
    return data


def decode_grant(data: bytes) -> RegistrationGrant:
    """Unpacks and checks a grant. Raises RegistryError."""
    body = _unpacked(data, MAX_ENTRY_BYTES)
    owner, adapters = body.get("owner"), body.get("adapters")
    names = isinstance(adapters, list) and all(isinstance(name, str) for name in adapters)
    if not isinstance(owner, str) or not isinstance(adapters, list) or not names:
        raise RegistryError("grant of a model: owner or adapters are missing or of another type")
    return RegistrationGrant(owner=owner, adapters=tuple(adapters))


def as_granted(model: RegisteredModel, name: str, grant: RegistrationGrant) -> RegisteredModel:
    """The entry, owned as the grant says. Raises RegistryError if the grant does not allow it."""
    if model.name != name:
        raise RegistryError("model entry: is another model's")
    if strange := sorted({*model.adapters} - {*grant.adapters}):
        raise RegistryError(
            f"model entry: adapter {strange[0][:80]!r} is not granted to this model; name it when "
            "its Redis user is made"
        )
    return replace(model, owner=grant.owner)


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
