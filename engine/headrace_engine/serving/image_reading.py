"""Reads the images of leased requests, without delaying the event loop or the engine's steps."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from weakref import WeakValueDictionary

from headrace_common.errors import FailureCode, RequestFailed
from headrace_common.protocol.base import EngineQueue
from headrace_common.sealing.sealer import SealingError
from headrace_common.wire.images import ImageSpan
from headrace_common.wire.messages import GenerateRequest

from ..core.errors import RequestError
from ..core.images import Pixels
from ..core.request import EngineRequest
from ..models.vision.image_reader import ImageReader
from .reply_writer import retry


class ImageReading:
    """Reads in a thread; its methods are called on the event loop's thread.

    Requests that have the same image at the same time share its pixels. `reader` is None if the
    model reads no images.
    """

    def __init__(self, queue: EngineQueue, reader: ImageReader | None) -> None:
        self._queue, self._reader = queue, reader
        self._executor = ThreadPoolExecutor(1, "images")
        # Used by the thread only.
        self._known: WeakValueDictionary[bytes, Pixels] = WeakValueDictionary()

    async def complete(self, leased: GenerateRequest, request: EngineRequest) -> EngineRequest:
        """Returns the request with its images. Raises RequestError, and RequestFailed if the queue
        has lost an image or it cannot be opened."""
        if not leased.images:
            return request
        if self._reader is None:
            raise RequestError("this engine reads no images: send text only")
        pixels = [await self._pixels(self._reader, leased, span) for span in leased.images]
        return replace(request, images=self._reader.place(leased.images, pixels))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _pixels(
        self, reader: ImageReader, leased: GenerateRequest, span: ImageSpan
    ) -> Pixels:
        try:
            data = await retry(lambda: self._queue.image(leased, span.digest), "read an image")
        except SealingError as error:
            raise RequestFailed(FailureCode.SEALED, str(error)) from error
        if data is None:
            raise RequestFailed(FailureCode.LOST, "an image is lost; send the request again")
        running_loop = asyncio.get_running_loop()
        return await running_loop.run_in_executor(self._executor, self._read, reader, span, data)

    def _read(self, reader: ImageReader, span: ImageSpan, data: bytes) -> Pixels:
        known = self._known.get(span.digest)
        if known is None:
            known = self._known[span.digest] = reader.decode(span, data)
        return known
