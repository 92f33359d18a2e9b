"""Images of leased requests: read once for all requests that have one at the same time, and every
failure ends its request only."""

import asyncio
import gc
from dataclasses import replace
from unittest.mock import AsyncMock

import numpy as np
import pytest

from headrace_common.errors import FailureCode, RequestFailed
from headrace_common.protocol.base import EngineQueue
from headrace_common.sealing.sealer import SealingError
from headrace_common.wire.images import ImageSpan, image_digest
from headrace_common.wire.messages import GenerateRequest
from headrace_engine.core.errors import RequestError
from headrace_engine.core.images import Pixels
from headrace_engine.core.request import EngineRequest
from headrace_engine.models.vision.image_reader import ImageReader
from headrace_engine.serving.image_reading import ImageReading
from headrace_testing.backends import make_request


class Reader(ImageReader):
    """Makes pixels of one element: the number of images read so far."""

    def __init__(self) -> None:
        self.merge, self.read_bytes = 2, list[bytes]()

    def decode(self, span: ImageSpan, data: bytes) -> Pixels:
        if data == b"broken":
            raise RequestError("an image cannot be read: it is broken")
        self.read_bytes.append(data)
        return Pixels({"pixel_values": np.array([len(self.read_bytes)])})


def queued(*images: bytes) -> GenerateRequest:
    spans = tuple(
        ImageSpan(digest=image_digest(data, b""), start=10 * at, length=6, grid=(1, 4, 6))
        for at, data in enumerate(images)
    )
    return replace(make_request(), prompt_token_ids=tuple(range(40)), images=spans)


def run_of(request: GenerateRequest) -> EngineRequest:
    return EngineRequest(
        request_id="r", prompt_token_ids=request.prompt_token_ids, params=request.sampling, seed=0
    )


def queue_with(*images: bytes | Exception | None) -> AsyncMock:
    queue = AsyncMock(spec=EngineQueue)
    queue.image.side_effect = images
    return queue


async def test_a_request_gets_its_images() -> None:
    reader, request = Reader(), queued(b"one", b"two")
    reading = ImageReading(queue_with(b"one", b"two"), reader)
    completed = await reading.complete(request, run_of(request))
    assert [image.span for image in completed.images] == list(request.images)
    assert [int(image.pixels.arrays["pixel_values"][0]) for image in completed.images] == [1, 2]
    assert [(image.position, image.shift) for image in completed.images] == [(0, -3), (7, -6)]
    assert (await reading.complete(queued(), run_of(queued()))).images == ()
    reading.close()


async def test_requests_that_have_an_image_at_the_same_time_share_it() -> None:
    reader, request = Reader(), queued(b"one")
    reading = ImageReading(queue_with(*[b"one"] * 4), reader)
    three = [reading.complete(request, run_of(request)) for _ in range(3)]
    completed = await asyncio.gather(*three)
    assert reader.read_bytes == [b"one"]
    assert completed[0].images[0].pixels is completed[2].images[0].pixels
    del completed, three
    await asyncio.sleep(0)  # the event loop lets go of the results
    gc.collect()
    await reading.complete(request, run_of(request))
    assert reader.read_bytes == [b"one", b"one"], "no request had it any more"
    reading.close()


@pytest.mark.parametrize(
    ("answer", "failure"),
    [(None, FailureCode.LOST), (SealingError("wrong key"), FailureCode.SEALED)],
)
async def test_an_image_that_the_queue_does_not_give_fails_its_request(
    answer: Exception | None, failure: FailureCode
) -> None:
    request = queued(b"one")
    reading = ImageReading(queue_with(answer), Reader())
    with pytest.raises(RequestFailed) as caught:
        await reading.complete(request, run_of(request))
    assert caught.value.failure is failure
    reading.close()


async def test_an_image_that_cannot_be_read_is_refused() -> None:
    request = queued(b"broken")
    reading = ImageReading(queue_with(b"broken"), Reader())
    with pytest.raises(RequestError, match="it is broken"):
        await reading.complete(request, run_of(request))
    reading.close()


async def test_an_engine_without_a_tower_refuses_images() -> None:
    request = queued(b"one")
    reading = ImageReading(queue_with(), None)
    with pytest.raises(RequestError, match="reads no images"):
        await reading.complete(request, run_of(request))
    reading.close()
