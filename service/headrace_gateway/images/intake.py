"""Takes in the images of a request: their bytes, their checks, and their sizes.

An image is decoded in a process that may be killed, before anything else reads it. Equal images of
a tenant are decoded once while the gateway remembers them.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from headrace_common.images.check import PRELOAD, ImageSize, size_or_fault
from headrace_common.images.layout import ImageError, ImageFormat, ImageLayout
from headrace_common.pools.fair_slots import FairSlots, SlotsFull
from headrace_common.pools.limited_pool import KillReason, LimitedPool, TaskKilled, TaskLimits
from headrace_common.wire.images import ImageData, content_hash

from ..errors import busy, invalid, unavailable
from ..limits.work import Work
from .data_urls import decode_data_url, invalid_image, is_data_url
from .fetching import BUSY, Fetcher
from .held_images import HeldImages, HeldImagesFull, Key

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadImage:
    """An image that was decoded. `name` is that of its field, for errors."""

    name: str
    data: ImageData
    size: ImageSize

    def layout(self, form: ImageFormat) -> ImageLayout:
        """Returns its tokens for a model. Raises ApiError."""
        try:
            return form.layout(self.size.width, self.size.height)
        except ImageError as error:
            raise invalid_image(self.name, str(error)) from error


class ImageIntake:
    """Reads images. Use it on one event loop. Processes start with the first image."""

    def __init__(self, limits: ImageLimits, fetcher: Fetcher) -> None:
        self._limits = limits
        self._fetcher = fetcher
        task = TaskLimits(
            timeout=2 * DECODE_S,
            cpu_seconds=DECODE_S,
            memory_bytes=DECODER_BYTES + BYTES_PER_PIXEL * limits.pixels,
        )
        self._pool = LimitedPool(limits.workers, task, PRELOAD)
        self._slots = FairSlots(
            limits.workers, most=MOST_WAITING, most_of_tenant=MOST_WAITING_OF_TENANT
        )
        self._held = HeldImages(limits.held_bytes)
        self._decoding: dict[Key, asyncio.Task[Decoded]] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of all images in memory."""
        return self._held.total_bytes

    async def read(self, sources: Sequence[tuple[str, str]], work: Work) -> list[ReadImage]:
        """Reads images, given by the names of their fields and their URLs, for `work`'s tenant.

        Raises ApiError.
        """
        if len(sources) > self._limits.images:
            name, _ = sources[self._limits.images]
            raise invalid(
                f"{name}: {len(sources)} images are over the limit of {self._limits.images} "
                "(max_images).",
                param=name,
                code="too_many_images",
            )
        return [await self._read(name, url, work) for name, url in sources]

    async def close(self) -> None:
        tasks = list(self._decoding.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.close()

    async def _read(self, name: str, url: str, work: Work) -> ReadImage:
        encoded = await self._encoded(name, url, work)
        content = await work.run(len(encoded), partial(content_hash, encoded))
        found = await self._decoded(encoded, (work.tenant, content))
        if isinstance(found, str):
            raise invalid_image(name, found)
        data, size = found
        return ReadImage(name=name, data=data, size=size)

    async def _decoded(self, encoded: bytes, key: Key) -> Decoded:
        """Returns what is known of an image, or decodes it; equal images wait for one process."""
        found = self._held.find(key)
        if found is not None:
            return found
        task = self._decoding.get(key)
        if task is None:
            try:
                data = self._held.hold(encoded, key)
            except HeldImagesFull as full:
                message = (
                    "The server has as many images in memory as it may (max_held_image_bytes; one "
                    "tenant half of it); send the request again."
                )
                raise busy(message, code=BUSY, of_tenant=full.tenant) from full
            task = self._decoding[key] = asyncio.create_task(self._decode(data, key))
            task.add_done_callback(lambda ended: self._end(key, ended))
        await asyncio.wait({task})  # cancelling this request does not end the decoding
        return task.result()

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
                return "it takes too much to decode; send a smaller or simpler one"
            message = f"An image was not decoded within {2 * DECODE_S} s; send the request again."
            raise unavailable(message, code=BUSY) from killed
        if isinstance(found, str):
            return found
        self._held.remember(key, data, found)
        return data, found
