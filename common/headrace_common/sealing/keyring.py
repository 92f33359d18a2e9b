"""The file of keys that seal records.

Each line is one key: 32 random bytes in base64. The first key seals, all keys open. A key's id is
computed from the key, so that it is unique and always right.
"""

import base64
import binascii
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import HeadraceError

KEY_BYTES = 32
ID_BYTES = 8
MAX_KEYS = 64
MAX_FILE_BYTES = 64 * 1024
SECRET_FIELD = "keyring"  # noqa: S105 - a name, not a secret
_ID_OF = b"headrace sealing key id\0"


class KeyringError(HeadraceError):
    """A file of sealing keys cannot be used; the message says where and why, not its content."""

    code = "sealing_keys_invalid"


@dataclass(frozen=True, slots=True)
class SealingKey:
    """One key. Its `secret` is not shown."""

    secret: bytes = field(repr=False)

    @property
    def id(self) -> bytes:
        """`ID_BYTES` bytes that are part of every record sealed with this key."""
        return hashlib.sha256(_ID_OF + self.secret).digest()[:ID_BYTES]

    @property
    def name(self) -> str:
        """The id in hexadecimal, for people."""
        return self.id.hex()

    @property
    def line(self) -> str:
        """The key as a line of a file."""
        return base64.b64encode(self.secret).decode()


class Keyring:
    """One or more keys; the first one seals."""

    def __init__(self, keys: Sequence[SealingKey]) -> None:
        self.keys = tuple(keys)
        self._by_id = {key.id: key for key in keys}

    @property
    def first(self) -> SealingKey:
        return self.keys[0]

    @property
    def names(self) -> list[str]:
        return [key.name for key in self.keys]

    def find(self, key_id: bytes) -> SealingKey | None:
        return self._by_id.get(key_id)


def new_key() -> SealingKey:
    """Makes a new random key."""
    return SealingKey(secrets.token_bytes(KEY_BYTES))


def read_keyring(data: bytes) -> Keyring:
    """The keys of a file. Raises KeyringError."""
    if len(data) > MAX_FILE_BYTES:
        raise KeyringError(f"it has more than {MAX_FILE_BYTES} bytes")
    lines = [line.partition(b"#")[0].strip() for line in data.splitlines()]
    keys = [_key(number, line) for number, line in enumerate(lines, 1) if line]
    if not 0 < len(keys) <= MAX_KEYS:
        raise KeyringError(f"it has {len(keys)} keys, not 1 to {MAX_KEYS}")
    if len({key.id for key in keys}) < len(keys):
        raise KeyringError("it has the same key twice")
    return Keyring(keys)


def write_keyring(keys: Sequence[SealingKey]) -> str:
    """The text of a file with these keys."""
    return "".join(f"{key.line}\n" for key in keys)


def _key(number: int, line: bytes) -> SealingKey:
    try:
        secret = base64.b64decode(line, validate=True)
    except binascii.Error:
        raise KeyringError(f"line {number} is not base64") from None
    if len(secret) != KEY_BYTES:
        raise KeyringError(f"line {number}: a key has {KEY_BYTES} bytes, not {len(secret)}")
    return SealingKey(secret)
