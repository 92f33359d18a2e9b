"""Follows the file of a process's keyring."""

import asyncio
from collections.abc import Mapping

from ..followed_file import FollowedFile, Sleep
from .aes import AesSealer
from .keyring import MAX_FILE_BYTES, Keyring, read_keyring
from .sealer import NULL_SEALER, Sealer
from .settings import SealingSettings


class KeyringFile(FollowedFile[Keyring]):
    """A sealer with the keys of a file that is followed. Without a file nothing is sealed."""

    name = "sealing keys"
    setting = "sealing_keys_file"
    remedy = "headrace sealing create"
    max_bytes = MAX_FILE_BYTES

    def __init__(self, settings: SealingSettings, sleep: Sleep = asyncio.sleep) -> None:
        """Reads the file. Raises SettingsError."""
        self._mode = settings.sealing_mode
        self._aes: AesSealer | None = None
        super().__init__(settings.sealing_keys_file, sleep)

    @property
    def sealer(self) -> Sealer:
        return NULL_SEALER if self._aes is None else self._aes

    def _parse(self, data: bytes) -> Keyring:
        return read_keyring(data)

    def _use(self, content: Keyring) -> Mapping[str, object]:
        if self._aes is None:
            self._aes = AesSealer(content, self._mode)
        else:
            self._aes.replace(content)
        return {"keys": content.names, "mode": self._mode}
