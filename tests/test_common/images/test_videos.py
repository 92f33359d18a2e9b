"""Frames of videos have the sizes and times of transformers' processors, and no bytes of a group of
frames are taken for an image."""

import re
from collections.abc import Callable
from itertools import product

import pytest
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as glm_size
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as qwen3_size

from headrace_common.images.formats import image_format
from headrace_common.images.frames import FrameGroup, decode_frames
from headrace_common.images.layout import NO_TOKENS, ImageError
from headrace_common.images.video import GlmVideo, PatchedVideo, Qwen3Video

SIDES = (1, 15, 16, 17, 31, 32, 33, 99, 250, 480, 1080)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (qwen3_size, Qwen3Video(placeholder=1)),
        (glm_size, GlmVideo(placeholder=1, precise=True)),
        (qwen3_size, Qwen3Video(placeholder=1, min_pixels=4096, max_pixels=25_165_824)),
    ],
)
def test_frames_are_resized_as_by_transformers(
    theirs: Callable[..., tuple[int, int]], ours: PatchedVideo
) -> None:
    side = ours.patch_size * ours.merge
    bounds = {"min_pixels": ours.min_pixels, "max_pixels": ours.max_pixels, "factor": side}
    for frames, width, height in product((2, 3, 5, 16, 47), SIDES, SIDES):
        if max(width, height) <= 100 * min(width, height):
            high, wide = theirs(frames, height, width, **bounds)
            assert ours.resized(frames, width, height) == (wide, high), (frames, width, height)


def test_times_are_written_as_by_transformers() -> None:
    """Qwen has the middle of a pair's times, or a single frame's time, GLM that of the first."""
    times = [0.0, 0.5, 1.0, 1.5, 62.25]
    qwen, glm = Qwen3Video(placeholder=1), GlmVideo(placeholder=1, precise=True)
    assert re.findall("<([0-9.]+) seconds>", qwen.text(times)) == ["0.2", "1.2", "62.2"]
    assert glm.text(times).count("<|image|>") == 3
    assert glm.text(times).endswith("<|end_of_image|>62.2 seconds")
    whole = GlmVideo(placeholder=1, precise=False)
    assert whole.text(times).endswith("<|end_of_image|>62")
    form = image_format(
        {"model_type": "gemma4", "vision_config": {"depth": 1}}, {}, {"a": 1}, {"a": 1}, NO_TOKENS
    )
    assert form is not None and form.video is not None
    assert form.video.text(times[-2:]) == "00:01 <|video|> 01:02 <|video|>"


def test_only_frames_are_read_as_frames() -> None:
    group = FrameGroup(width=32, height=64, frames=[b"one", b"two"])
    assert decode_frames(group.encode()) == group
    assert decode_frames(b"\x89PNG") is None
    with pytest.raises(ImageError, match="damaged"):
        decode_frames(group.encode()[:-1])
    with pytest.raises(ImageError, match="damaged"):
        decode_frames(group.encode() + b"x")
