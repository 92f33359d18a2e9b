"""Seals with AES-256-GCM.

A record is PREFIX, key id, salt, count, ciphertext with its tag. Each process seals with its own
key, which HKDF derives from the keyring's key and the process's random salt, and counts its
records. So no nonce repeats, no matter how many records all processes write. Random nonces of 96
bits under one key would be safe for only 2^32 records, which a busy fleet writes in a day.
"""

import hmac
import os
import secrets
from itertools import count

import msgpack
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from .keyring import ID_BYTES, KEY_BYTES, Keyring, SealingKey
from .sealer import MAGIC, PREFIX, VERSION, Binding, PayloadKind, SealingError, key_id_of
from .settings import SealingMode

SALT_BYTES = 16
COUNT_BYTES = 8
TAG_BYTES = 16
HEADER_BYTES = len(PREFIX) + ID_BYTES + SALT_BYTES
OVERHEAD_BYTES = HEADER_BYTES + COUNT_BYTES + TAG_BYTES
MOST_RECORDS = 2**32  # records per derived key
MOST_DERIVED = 4096  # cached keys of other processes
_ZEROS = bytes(4)  # a nonce has 12 bytes
_INFO = b"headrace sealing, one process"


class _Writer:
    """The derived key with which this process seals, under one key of the keyring."""

    def __init__(self, key: SealingKey) -> None:
        salt = secrets.token_bytes(SALT_BYTES)
        self.process = os.getpid()
        self.header = PREFIX + key.id + salt
        self.cipher = _derived(key, salt)
        self._counts = count()

    def next_count(self) -> bytes | None:
        """A number that no other record under this key has; None if all are used."""
        number = next(self._counts)
        return number.to_bytes(COUNT_BYTES) if number < MOST_RECORDS else None


class AesSealer:
    """A Sealer with the keys of a keyring, which may be replaced during use."""

    opens = True

    def __init__(self, ring: Keyring, mode: SealingMode = "require") -> None:
        self._mode = mode
        self._secret: bytes | None = None
        self.ring = ring
        self._writer = _Writer(ring.first)
        self._readers: dict[bytes, AESGCM] = {}

    @property
    def seals(self) -> bool:
        return self._mode != "open"

    @property
    def key_id(self) -> bytes:
        return self.ring.first.id

    def replace(self, ring: Keyring) -> None:
        """From now on seals with the first key of another keyring, and opens with its keys only."""
        self.ring = ring
        self._readers = {}
        self._writer = _Writer(ring.first)

    def share(self, secret: bytes) -> None:
        """Sets the secret that `digests` uses, which all processes have in common."""
        self._secret = secret

    def seal(self, kind: PayloadKind, binding: Binding, data: bytes) -> bytes:
        if not self.seals:
            return data
        writer, number = self._counted()
        sealed = writer.cipher.encrypt(_ZEROS + number, data, _associated(kind, binding))
        return writer.header + number + sealed

    def _counted(self) -> tuple[_Writer, bytes]:
        """The derived key and an unused count; a forked child must not use its parent's key."""
        while True:
            writer = self._writer
            number = writer.next_count() if writer.process == os.getpid() else None
            if number is not None:
                return writer, number
            self._writer = _Writer(self.ring.first)

    def open(self, kind: PayloadKind, binding: Binding, data: bytes) -> bytes:
        """Opens a record. Raises SealingError."""
        if not data.startswith(MAGIC):
            if self._mode == "require":
                raise SealingError(
                    f"{kind}: it is not sealed; while sealing is being switched on, set "
                    "sealing_mode to accept"
                )
            return data
        if not data.startswith(PREFIX) or len(data) < OVERHEAD_BYTES:
            raise SealingError(f"{kind}: its seal is cut short, or not of version {VERSION}")
        number = data[HEADER_BYTES : HEADER_BYTES + COUNT_BYTES]
        rest = memoryview(data)[HEADER_BYTES + COUNT_BYTES :]
        cipher = self._cipher(kind, data[:HEADER_BYTES])
        try:
            return cipher.decrypt(_ZEROS + number, rest, _associated(kind, binding))
        except InvalidTag:
            raise SealingError(f"{kind}: it was changed, or belongs to another place") from None

    def _cipher(self, kind: PayloadKind, header: bytes) -> AESGCM:
        readers = self._readers
        if (known := readers.get(header)) is not None:
            return known
        key_id = key_id_of(header)
        key = self.ring.find(key_id)
        if key is None:
            raise SealingError(
                f"{kind}: it is sealed with the key {key_id.hex()}, which is not in "
                "sealing_keys_file: add it"
            )
        if len(readers) >= MOST_DERIVED:
            readers.clear()
        cipher = readers[header] = _derived(key, header[-SALT_BYTES:])
        return cipher

    def digests(self, digest: bytes) -> tuple[bytes, ...]:
        if self._secret is None:
            return (digest,)
        own = hmac.digest(self._secret, digest, "sha256")[: len(digest)]
        if self._mode == "require":
            return (own,)
        return (own, digest) if self.seals else (digest, own)


def _derived(key: SealingKey, salt: bytes) -> AESGCM:
    derivation = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=_INFO)
    return AESGCM(derivation.derive(key.secret))


def _associated(kind: PayloadKind, binding: Binding) -> bytes:
    packed: bytes = msgpack.packb((VERSION, kind.value, *binding))
    return packed
