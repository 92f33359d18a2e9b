"""Takes in the images of a request: their bytes, their checks, and their sizes.

An image is decoded in a process that may be killed, before anything else reads it. Equal images of
a tenant are decoded once while the gateway remembers them.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace_common.images.check import PRELOAD, ImageSize, size_or_fault
from headrace_common.pools.fair_slots import FairSlots, SlotsFull
from headrace_common.pools.limited_pool import KillReason, LimitedPool, TaskKilled, TaskLimits
from headrace_common.protocol.batches import FileNotStored, StoredFile
from headrace_common.wire.images import ImageData, content_hash

from ..errors import busy, unavailable
from ..limits.work import Work
from ..schemas.chat_messages import ImageSource
from ..telemetry.metrics import ImageResult
from .data_urls import (
    decode_data_url,
    decode_frames,
    invalid_image,
    is_data_url,
    too_many,
    too_many_bytes,
)
from .fetching import BUSY, Fetcher
from .held_images import HeldImages, HeldImagesFull, Key
from .read_images import ReadImage, ReadVideo
from .uploads import UploadedImages, not_stored

# Uploaded images that are read from Redis at once.
MOST_LOADS = 4
MOST_WAITING = 256
MOST_WAITING_OF_TENANT = 128
MAX_WAIT_S = 10.0
DECODE_S = 5
# Of a decoder: the pixels, the coefficients of a progressive JPEG, and copies.
BYTES_PER_PIXEL = 16
DECODER_BYTES = 48 * 2**20

# An image with its size, or what is wrong with it.
Decoded = tuple[ImageData, ImageSize] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """The most images of a request, bytes and pixels of an image, bytes of all images in memory,
    and the number of processes that decode."""

    images: int
    image_bytes: int
    pixels: int
    held_bytes: int
    workers: int


class ImageIntake:
    """Reads images. Use it on one event loop. Processes start with the first image.

    `report` is called with the result of each image.
    """

    def __init__(
        self,
        limits: ImageLimits,
        fetcher: Fetcher,
        uploads: UploadedImages,
        report: Callable[[ImageResult], None],
    ) -> None:
        self._limits = limits
        self._report = report
        self._fetcher = fetcher
        self._uploads = uploads
        task = TaskLimits(
            timeout=2 * DECODE_S,
            cpu_seconds=DECODE_S,
            memory_bytes=DECODER_BYTES + BYTES_PER_PIXEL * limits.pixels,
        )
        self._pool = LimitedPool(limits.workers, task, PRELOAD)
        self._slots = FairSlots(
            limits.workers, most=MOST_WAITING, most_of_tenant=MOST_WAITING_OF_TENANT
        )
        self._loads = FairSlots(
            MOST_LOADS, most=MOST_WAITING, most_of_tenant=MOST_WAITING_OF_TENANT
        )
        self._held = HeldImages(limits.held_bytes)
        self._decoding: dict[Key, asyncio.Task[Decoded]] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of all images in memory."""
        return self._held.total_bytes

    async def read(self, sources: Sequence[ImageSource], work: Work) -> list[ReadImage | ReadVideo]:
        """Reads images and videos for `work`'s tenant. Raises ApiError."""
        most, found = self._limits.images, list[ReadImage | ReadVideo]()
        if len(sources) > most:
            raise too_many(sources[most].name, len(sources), most)
        count = 0
        for source in sources:
            if source.video:
                video = await self._read_video(source, count, work)
                count += len(video.frames)
                found.append(video)
            else:
                count += 1
                found.append(await self._read(source, work))
        if count > most:
            raise too_many(sources[-1].name, count, most)
        return found

    async def hold(self, encoded: bytes, work: Work) -> ImageData:
        """Counts bytes that stand for an image until they are no longer used. Raises ApiError."""
        content = await work.run(len(encoded), partial(content_hash, encoded))
        return self._hold(encoded, (work.tenant, content))

    async def check(self, encoded: bytes, name: str, work: Work) -> bytes:
        """Reads an image that is going to be stored; returns its content hash.

        Raises ApiError, which calls the field `name`.
        """
        if len(encoded) > self._limits.image_bytes:
            raise too_many_bytes(name, self._limits.image_bytes)
        return (await self._read_bytes(name, encoded, work)).data.content

    async def close(self) -> None:
        tasks = list(self._decoding.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.close()

    async def _read(self, source: ImageSource, work: Work) -> ReadImage:
        name, url = source.name, source.url
        if source.file_id is not None:
            file = await self._uploads.find(source.file_id, name, work.tenant)
            return _read_image(name, await self._of_file(file, name, work.tenant))
        assert url is not None
        return await self._read_bytes(name, await self._encoded(name, url, work), work)

    async def _read_video(self, source: ImageSource, before: int, work: Work) -> ReadVideo:
        name, url = source.name, source.url
        assert url is not None
        limits = self._limits
        decode = partial(decode_frames, url, name, limits.image_bytes, before, limits.images)
        frames = [
            await self._read_bytes(f"{name}[{number}]", frame, work)
            for number, frame in enumerate(await work.run(len(url), decode))
        ]
        return ReadVideo(name=name, frames=frames)

    async def _read_bytes(self, name: str, encoded: bytes, work: Work) -> ReadImage:
        content = await work.run(len(encoded), partial(content_hash, encoded))
        key = (work.tenant, content)
        found: Decoded | None = self._known(key)
        if found is None:
            if not self._is_decoding(key):
                self._start(key, self._decode(self._hold(encoded, key), key))
            found = await self._decoded(key)
        return _read_image(name, found)

    async def _of_file(self, file: StoredFile, name: str, tenant: str) -> Decoded:
        """Returns an uploaded image; it is not read from Redis if it is in memory."""
        key = (tenant, bytes.fromhex(file.digest))
        found = self._known(key)
        if found is not None:
            return found
        if not self._is_decoding(key):
            self._start(key, self._load(file, key))
        try:
            return await self._decoded(key)
        except FileNotStored as error:
            raise not_stored(name, error) from error

    def _known(self, key: Key) -> tuple[ImageData, ImageSize] | None:
        found = self._held.find(key)
        if found is not None:
            self._report(ImageResult.KNOWN)
        return found

    def _is_decoding(self, key: Key) -> bool:
        if key not in self._decoding:
            return False
        self._report(ImageResult.KNOWN)
        return True

    def _start(self, key: Key, decoding: Coroutine[Any, Any, Decoded]) -> None:
        task = self._decoding[key] = asyncio.create_task(decoding)
        task.add_done_callback(lambda ended: self._end(key, ended))

    async def _decoded(self, key: Key) -> Decoded:
        """Returns an image that is being decoded; equal images wait for one process."""
        task = self._decoding[key]
        await asyncio.wait({task})  # cancelling this request does not end the decoding
        return task.result()

    async def _load(self, file: StoredFile, key: Key) -> Decoded:
        tenant, _ = key
        try:
            async with self._loads.hold(tenant, MAX_WAIT_S):
                data = self._hold(await self._uploads.content(file), key)
        except SlotsFull as full:
            message = "Too many images are being read; send the request again."
            raise busy(message, code=BUSY, of_tenant=full.tenant) from full
        return await self._decode(data, key)

    def _hold(self, encoded: bytes, key: Key) -> ImageData:
        try:
            return self._held.hold(encoded, key)
        except HeldImagesFull as full:
            message = (
                "The server has as many images in memory as it may (max_held_image_bytes; one "
                "tenant half of it); send the request again."
            )
            raise busy(message, code=BUSY, of_tenant=full.tenant) from full

    def _end(self, key: Key, ended: "asyncio.Task[Decoded]") -> None:
        del self._decoding[key]
        if not ended.cancelled():
            ended.exception()  # seen, even if no request waits for it any more

    async def _encoded(self, name: str, url: str, work: Work) -> bytes:
        if is_data_url(url):
            decode = partial(decode_data_url, url, name, self._limits.image_bytes)
            return await work.run(len(url), decode)
        return await self._fetcher.fetch(url, name, work.tenant)

    async def _decode(self, data: ImageData, key: Key) -> Decoded:
        tenant, _ = key
        try:
            async with self._slots.hold(tenant, MAX_WAIT_S):
                found = await self._pool.run(size_or_fault, data.encoded, self._limits.pixels)
        except SlotsFull as full:
            message = "Too many images are being decoded; send the request again."
            raise busy(message, code=BUSY, of_tenant=full.tenant) from full
        except TaskKilled as killed:
            if killed.reason is not KillReason.TIMEOUT:
                self._report(ImageResult.REFUSED)
                return "it takes too much to decode; send a smaller or simpler one"
            message = f"An image was not decoded within {2 * DECODE_S} s; send the request again."
            raise unavailable(message, code=BUSY) from killed
        if isinstance(found, str):
            self._report(ImageResult.REFUSED)
            return found
        self._report(ImageResult.DECODED)
        self._held.remember(key, data, found)
        return data, found


def _read_image(name: str, found: Decoded) -> ReadImage:
    if isinstance(found, str):
        raise invalid_image(name, found)
    data, size = found
    return ReadImage(name=name, data=data, size=size)
