"""Sealing for both sides of a benchmark: a file of keys, and a sealer that uses it."""

from pathlib import Path

from headrace_common.sealing.aes import AesSealer
from headrace_common.sealing.keyring import new_key, read_keyring, write_keyring
from headrace_common.sealing.sealer import NULL_SEALER, Sealer


def new_keys_file(folder: Path) -> Path:
    """A file with one key."""
    path = folder / "keyring"
    path.write_text(write_keyring([new_key()]))
    return path


def sealer_of(path: Path | None) -> Sealer:
    """A sealer with the keys of a file; without a file, one that seals nothing."""
    return NULL_SEALER if path is None else AesSealer(read_keyring(path.read_bytes()))
