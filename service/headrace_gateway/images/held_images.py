"""The images that this gateway has in memory: those of requests in flight, and some seen lately."""

import weakref
from collections import Counter, OrderedDict

from headrace_common.images.check import ImageSize
from headrace_common.wire.images import ImageData

Key = tuple[str, bytes]  # tenant and content: no tenant can learn what another one sent


class HeldImagesFull(Exception):
    """An image does not fit into memory. `tenant` says that the tenant's own limit is reached."""

    def __init__(self, *, tenant: bool) -> None:
        super().__init__("the tenant's limit" if tenant else "the limit of all tenants")
        self.tenant = tenant


class HeldImages:
    """Counts the bytes of all images in memory, and remembers the last ones that were read.

    One tenant has at most half of `max_bytes`. A remembered image is forgotten when its bytes are
    needed. Images of requests in flight are held by the requests themselves.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes: Counter[str] = Counter()
        self._known: OrderedDict[Key, tuple[ImageData, ImageSize]] = OrderedDict()

    @property
    def total_bytes(self) -> int:
        """Bytes of all images in memory."""
        return self._bytes.total()

    def find(self, key: Key) -> tuple[ImageData, ImageSize] | None:
        """Returns an image that was read lately, with its size."""
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
        return found

    def hold(self, encoded: bytes, key: Key) -> ImageData:
        """Returns an image whose bytes count until it is no longer used.

        Forgets remembered images if that makes room. Raises HeldImagesFull.
        """
        tenant, content = key
        size = len(encoded)
        for known in [each for each in self._known if each[0] == tenant]:
            if self._fits(size, tenant):
                break
            del self._known[known]
        if not self._fits(size, tenant):
            raise HeldImagesFull(tenant=True)
        while self._known and self.total_bytes + size > self._max_bytes:
            self._known.popitem(last=False)
        if self.total_bytes + size > self._max_bytes:
            raise HeldImagesFull(tenant=False)
        data = ImageData(encoded, content)
        self._bytes[tenant] += size
        weakref.finalize(data, self._release, tenant, size).atexit = False
        return data

    def remember(self, key: Key, data: ImageData, size: ImageSize) -> None:
        """Remembers an image that was read."""
        self._known[key] = (data, size)

    def _fits(self, size: int, tenant: str) -> bool:
        return self._bytes[tenant] + size <= self._max_bytes // 2

    def _release(self, tenant: str, size: int) -> None:
        self._bytes[tenant] -= size
        if not self._bytes[tenant]:
            del self._bytes[tenant]
