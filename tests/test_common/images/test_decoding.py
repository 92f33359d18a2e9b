"""Decoding of images: formats, orientation, and files that are no image."""

import io
import re

import pytest
from PIL import Image

from headrace_common.images.check import ImageSize, size_or_fault
from headrace_common.images.decoding import open_image
from headrace_testing.images import KINDS, bomb, picture, png_of_size

MAX_PIXELS = 1_000_000


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_opened_in_rgb(kind: str) -> None:
    image = open_image(picture(60, 40, kind), MAX_PIXELS)

    assert image.mode == "RGB" and image.size == (60, 40)
    assert size_or_fault(picture(60, 40, kind), MAX_PIXELS) == ImageSize(width=60, height=40)


def test_an_image_stands_upright() -> None:
    out, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # orientation: turned by a quarter
    Image.new("RGB", (60, 40)).save(out, "JPEG", exif=exif)

    assert open_image(out.getvalue(), MAX_PIXELS).size == (40, 60)


def test_the_first_frame_of_an_animation_is_read() -> None:
    out = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])

    assert open_image(out.getvalue(), MAX_PIXELS).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "not a PNG, JPEG, WebP or GIF"),
        (b"%PDF-1.7 nothing", "not a PNG, JPEG, WebP or GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a PNG, JPEG, WebP or GIF"),
        (picture(200, 200)[:-40], "damaged"),
        (picture(200, 200, "JPEG")[:300], "damaged"),
        (picture(200, 200, "WEBP")[:60], "damaged|not a PNG"),
        (picture(200, 200, "GIF")[:30], "damaged|not a PNG"),
        (png_of_size(0, 5), "damaged|not a PNG"),
        (png_of_size(2000, 2000), "2000 x 2000 pixels are more than 1000000"),
        (png_of_size(2**31 - 1, 2**31 - 1), "more than 1000000 pixels"),
        (bomb(4000), "4000 x 4000 pixels are more than 1000000"),
    ],
)
def test_what_is_no_good_image_is_refused(data: bytes, fault: str) -> None:
    found = size_or_fault(data, MAX_PIXELS)

    assert isinstance(found, str)
    assert re.search(fault, found), found
