"""Images of requests in the queue, in memory and on each kind of server."""

from dataclasses import replace

import pytest

from headrace_common.errors import ImagesFull
from headrace_common.protocol.base import AdmitState, QueueLimits
from headrace_common.wire.images import ImageData, ImageSpan, content_hash, image_digest
from headrace_common.wire.messages import GenerateRequest
from headrace_testing.backends import MODEL, Backend, make_request
from headrace_testing.queue_contract import LIMITS, ON_ALL_BACKENDS

pytestmark = ON_ALL_BACKENDS

CAT, DOG = b"\x89PNG a cat" * 50, b"\x89PNG a dog" * 50


def span(encoded: bytes, start: int = 1) -> ImageSpan:
    data = ImageData(encoded, content_hash(encoded))
    return ImageSpan(
        digest=image_digest(encoded, b""), start=start, length=1, grid=(1, 2, 2), data=data
    )


def about(*pictures: bytes, tenant: str = "default") -> GenerateRequest:
    """A request whose prompt has these pictures."""
    images = tuple(span(encoded, start) for start, encoded in enumerate(pictures))
    prompt = tuple(range(10, 11 + len(images)))
    return replace(make_request(prompt=prompt), images=images, tenant=tenant)


def without_data(request: GenerateRequest) -> GenerateRequest:
    """The request as a gateway has it that did not read its images."""
    images = tuple(replace(image, data=None) for image in request.images)
    return replace(request, images=images)


async def test_an_engine_gets_the_images_that_a_request_names(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await gateway.start()
    await engine.start()
    request = about(CAT, DOG, CAT)

    await gateway.admit(request, LIMITS)
    (lease,) = await engine.take(1)

    assert lease.request.images == request.images
    found = [await engine.image(lease.request, image.digest) for image in lease.request.images]
    assert found == [CAT, DOG, CAT]


async def test_an_image_that_no_request_brought_is_not_there(backend: Backend) -> None:
    engine = backend.engine()
    await engine.start()

    assert await engine.image(about(CAT), image_digest(CAT, b"another tenant")) is None


async def test_an_image_stays_while_one_of_its_requests_needs_it(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await gateway.start()
    await engine.start()
    first, second = about(CAT), about(CAT)
    await gateway.admit(first, LIMITS)
    await gateway.admit(second, LIMITS)

    await gateway.drop_images(first)
    await gateway.drop_images(first)

    assert await engine.image(second, second.images[0].digest) == CAT


async def test_another_gateway_can_admit_a_request_without_its_images(backend: Backend) -> None:
    gateway, other, engine = backend.gateway(), backend.gateway("h"), backend.engine()
    for queue in (gateway, other, engine):
        await queue.start()
    request = about(CAT)
    await gateway.admit(request, LIMITS)

    admitted = await other.admit(without_data(request), LIMITS)

    assert admitted.state is AdmitState.ATTACHED
    assert await engine.image(request, request.images[0].digest) == CAT


async def test_a_lost_request_is_queued_again_with_its_images(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await gateway.start()
    await engine.start()
    request = about(CAT)
    await gateway.admit(request, LIMITS)
    await backend.wipe()
    assert await engine.image(request, request.images[0].digest) is None

    await gateway.admit(request, LIMITS, seen=0)

    assert await engine.image(request, request.images[0].digest) == CAT


@pytest.mark.parametrize(
    "bounds", [{"max_tenant_images": 1}, {"max_tenant_image_bytes": len(CAT) + 100}]
)
async def test_the_images_of_a_tenant_are_bounded(backend: Backend, bounds: dict[str, int]) -> None:
    gateway = backend.gateway()
    await gateway.start()
    limits = QueueLimits(**bounds)
    await gateway.admit(about(CAT), limits)

    with pytest.raises(ImagesFull):
        await gateway.admit(about(DOG), limits)
    await gateway.admit(about(CAT), limits)
    await gateway.admit(about(DOG + b"of another", tenant="other"), limits)

    assert (await gateway.depth(MODEL)).waiting == 3


async def test_a_known_request_is_not_refused_for_its_images(backend: Backend) -> None:
    gateway = backend.gateway()
    await gateway.start()
    request = about(CAT)

    admitted = await gateway.admit(request, QueueLimits(max_tenant_images=0), seen=0)

    assert admitted.state is AdmitState.ADMITTED
