"""The intake of images: one decoding for equal images, bounds, and hostile files."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from headrace_common.images.check import ImageSize
from headrace_common.pools.limited_pool import LimitedPool
from headrace_gateway.errors import ApiError
from headrace_gateway.images.held_images import HeldImages, HeldImagesFull
from headrace_gateway.images.intake import ImageIntake
from headrace_gateway.images.read_images import ReadImage
from headrace_gateway.limits.work import Work, WorkPool
from headrace_gateway.schemas.chat_messages import ImageSource
from headrace_gateway.telemetry.metrics import ImageResult
from headrace_testing.images import (
    bomb,
    data_url,
    image_intake,
    picture,
    png_of_size,
    slow_jpeg,
)


@pytest.fixture
def work() -> Iterator[Work]:
    with ThreadPoolExecutor(2) as executor:
        yield WorkPool(executor, 2).of("a")


@pytest.fixture
async def intake() -> AsyncIterator[ImageIntake]:
    intake = image_intake()
    yield intake
    await intake.close()


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """All images that processes were given."""
    images: list[bytes] = []
    run = LimitedPool.run

    async def counted(pool: LimitedPool, function: Any, *arguments: Any) -> Any:
        images.append(arguments[0])
        return await run(pool, function, *arguments)

    monkeypatch.setattr(LimitedPool, "run", counted)
    return images


def named(*pictures: bytes) -> list[ImageSource]:
    return [
        ImageSource(f"image {number}", url=data_url(each)) for number, each in enumerate(pictures)
    ]


async def refusal(intake: ImageIntake, work: Work, *pictures: bytes) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await intake.read(named(*pictures), work)
    return refused.value


async def pictures(intake: ImageIntake, work: Work, *data: bytes) -> list[ReadImage]:
    read = await intake.read(named(*data), work)
    return [image for image in read if isinstance(image, ReadImage)]


async def test_equal_images_are_decoded_once(
    intake: ImageIntake, work: Work, decoded: list[bytes]
) -> None:
    one = picture()

    reads = await asyncio.gather(*(pictures(intake, work, one, one) for _ in range(32)))
    later = await pictures(intake, work, one)

    assert decoded == [one]
    assert len({id(image.data) for images in [*reads, later] for image in images}) == 1
    assert later[0].size == ImageSize(width=56, height=56)


async def test_results_are_reported(work: Work) -> None:
    results: list[ImageResult] = []
    intake = image_intake(results.append)
    try:
        await intake.read(named(picture(), picture()), work)
        await refusal(intake, work, b"no image")
    finally:
        await intake.close()

    assert results == [ImageResult.DECODED, ImageResult.KNOWN, ImageResult.REFUSED]


async def test_no_tenant_gains_by_an_image_of_another(
    intake: ImageIntake, work: Work, decoded: list[bytes]
) -> None:
    for tenant in ("a", "b", "a"):
        await intake.read(named(picture()), work.of(tenant))

    assert decoded == [picture(), picture()]


async def test_images_in_use_count_until_they_are_dropped(work: Work) -> None:
    one, other = picture(shade=1), picture(shade=2)
    intake = image_intake(held_bytes=2 * (len(one) + len(other)) - 2)
    try:
        first = await intake.read(named(one), work)
        assert intake.held_bytes == len(one)

        refused = await refusal(intake, work, other)
        assert (refused.status, refused.code) == (429, "images_busy")

        del first
        assert len(await intake.read(named(other), work)) == 1
        assert intake.held_bytes == len(other)
    finally:
        await intake.close()


def test_remembered_images_make_room() -> None:
    held = HeldImages(20)
    for content in (b"1", b"2", b"3"):
        data = held.hold(b"x" * 5, ("a", content))
        held.remember(("a", content), data, ImageSize(width=1, height=1))
        del data

    assert held.total_bytes == 10
    assert held.find(("a", b"1")) is None and held.find(("a", b"3")) is not None


def test_one_tenants_images_leave_room_for_others() -> None:
    held = HeldImages(20)
    kept = [held.hold(b"x" * 5, ("a", content)) for content in (b"1", b"2")]
    with pytest.raises(HeldImagesFull) as of_tenant:
        held.hold(b"x", ("a", b"3"))
    kept += [held.hold(b"x" * 5, ("b", content)) for content in (b"1", b"2")]
    with pytest.raises(HeldImagesFull) as of_all:
        held.hold(b"x", ("c", b"1"))

    assert of_tenant.value.tenant and not of_all.value.tenant
    del kept
    assert held.total_bytes == 0


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"x" * 200_001, "at most 200000 bytes"),
        (png_of_size(65_000, 65_000), "more than 1000000 pixels"),
        (bomb(4000), "more than 1000000 pixels"),
        (picture(900, 900)[:-500], "it is damaged"),
        (b"GIF89a" + b"\xff" * 1000, "more than 1000000 pixels|damaged|not a PNG"),
    ],
)
async def test_hostile_files_are_refused(
    intake: ImageIntake, work: Work, encoded: bytes, reason: str
) -> None:
    refused = await refusal(intake, work, picture(), encoded)

    assert (refused.status, refused.code, refused.param) == (400, "invalid_image", "image 1")
    assert any(each in refused.message for each in reason.split("|")), refused.message


async def test_a_file_that_takes_too_much_memory_ends_its_process_alone(work: Work) -> None:
    """The header tells the pixels, but no decoder is trusted with its memory."""
    intake = image_intake(pixels=100_000_000)
    intake._pool._limits = replace(intake._pool._limits, memory_bytes=16 * 2**20)
    try:
        refused = await refusal(intake, work, bomb(8000))
        assert (refused.status, refused.code) == (400, "invalid_image")
        assert "takes too much to decode" in refused.message
        assert len(await intake.read(named(picture()), work)) == 1
    finally:
        await intake.close()


async def test_a_file_that_takes_long_ends_its_process_alone(work: Work) -> None:
    intake = image_intake(pixels=10_000_000)
    intake._pool._limits = replace(intake._pool._limits, cpu_seconds=1, timeout=120)
    try:
        refused = await refusal(intake, work, slow_jpeg())
        assert (refused.status, refused.code) == (400, "invalid_image")
        assert "takes too much to decode" in refused.message
        assert len(await intake.read(named(picture()), work)) == 1
    finally:
        await intake.close()


async def test_a_request_that_leaves_does_not_end_the_decoding_of_others(
    intake: ImageIntake, work: Work
) -> None:
    first = asyncio.create_task(intake.read(named(picture()), work))
    second = asyncio.create_task(intake.read(named(picture()), work))
    await asyncio.sleep(0)
    first.cancel()

    assert len(await second) == 1
