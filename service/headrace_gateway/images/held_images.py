"""The images that this gateway has in memory: those of requests in flight, and some seen lately."""

import weakref
from collections import OrderedDict

from headrace_common.images.check import ImageSize
from headrace_common.wire.images import ImageData

Key = tuple[str, bytes]  # tenant and content: no tenant can learn what another one sent


class HeldImages:
    """Counts the bytes of all images in memory, and remembers the last ones that were read.

    A remembered image is forgotten when its bytes are needed. Images of requests in flight are held
    by the requests themselves.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: OrderedDict[Key, tuple[ImageData, ImageSize]] = OrderedDict()

    @property
    def total_bytes(self) -> int:
        """Bytes of all images in memory."""
        return self._bytes

    def find(self, key: Key) -> tuple[ImageData, ImageSize] | None:
        """Returns an image that was read lately, with its size."""
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
        return found

    def hold(self, encoded: bytes, content: bytes) -> ImageData | None:
        """Returns an image whose bytes count until it is no longer used; None if they are too many.

        Forgets remembered images if that makes room.
        """
        while self._known and self._bytes + len(encoded) > self._max_bytes:
            self._known.popitem(last=False)
        if self._bytes + len(encoded) > self._max_bytes:
            return None
        data = ImageData(encoded, content)
        self._bytes += len(encoded)
        weakref.finalize(data, self._release, len(encoded)).atexit = False
        return data

    def remember(self, key: Key, data: ImageData, size: ImageSize) -> None:
        """Remembers an image that was read."""
        self._known[key] = (data, size)

    def _release(self, size: int) -> None:
        self._bytes -= size
