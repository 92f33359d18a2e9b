"""Stores requests in a MemoryBackend, and behaves like the store in Redis."""

import secrets
from collections.abc import Sequence

from headrace_common.protocol.store import SALT_BYTES, StoredRequest, decode_stored, encode_stored

from .backend import MemoryBackend


class MemoryRequestStore:
    """A RequestStore in memory."""

    def __init__(self, backend: MemoryBackend) -> None:
        self._backend = backend

    async def salt(self) -> bytes:
        self._backend.check()
        self._backend.salt = self._backend.salt or secrets.token_bytes(SALT_BYTES)
        return self._backend.salt

    async def put(
        self, stored: StoredRequest, replaces: StoredRequest | None = None
    ) -> StoredRequest:
        known = await self.get(stored.request_id)
        if known is not None and (replaces is None or known.name != replaces.name):
            return known
        entry = (stored.expires_ms / 1000, stored.name, encode_stored(stored))
        self._backend.stored[stored.request_id] = entry
        return stored

    async def get(self, request_id: str) -> StoredRequest | None:
        self._backend.check()
        expires, _, data = self._backend.stored.get(request_id, (0.0, "", b""))
        return decode_stored(data) if expires > self._backend.clock() else None

    async def remove(self, stored: StoredRequest) -> None:
        known = await self.get(stored.request_id)
        if known is not None and known.name == stored.name:
            del self._backend.stored[stored.request_id]

    async def set_presence(self, request_id: str, seconds: float) -> None:
        self._backend.check()
        self._backend.presence_until[request_id] = self._backend.clock() + seconds

    async def begin_read(self, stored: StoredRequest, gateway_id: str) -> Sequence[str]:
        self._backend.check()
        gateways = self._backend.readers[stored.request_id]
        gateways.add(gateway_id)
        return sorted(gateways - {gateway_id})

    async def end_read(self, stored: StoredRequest, gateway_id: str) -> None:
        self._backend.check()
        self._backend.readers[stored.request_id].discard(gateway_id)

    async def presence_left(self, request_id: str) -> float:
        self._backend.check()
        return max(0.0, self._backend.presence_until.get(request_id, 0.0) - self._backend.clock())
