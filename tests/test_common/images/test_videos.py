"""Frames of videos have the sizes, times and texts of transformers' processors, and no bytes of a
group of frames are taken for an image."""

import re
from collections.abc import Callable
from itertools import product

import pytest
import torch
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as glm_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as qwen2_size
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as qwen3_size
from transformers.models.smolvlm.processing_smolvlm import (
    DEFAULT_MEDIA_OUTTRO,
    DEFAULT_VIDEO_INTRO,
    FRAME_TIMESTAMP_MESSAGE,
)

from headrace_common.images.formats import image_format
from headrace_common.images.frames import FrameGroup, decode_frames, group_frames
from headrace_common.images.layout import NO_TOKENS, ImageError, VideoFormat
from headrace_common.images.smolvlm import in_words
from headrace_common.images.video import GlmVideo, PatchedVideo, Qwen2Video, Qwen3Video

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


def test_frames_of_qwen2_are_resized_alone_as_by_transformers() -> None:
    ours = Qwen2Video(placeholder=1, positions_per_second=None)
    bounds = {"min_pixels": ours.min_pixels, "max_pixels": ours.max_pixels, "factor": 28}
    for width, height in product(SIDES, SIDES):
        if max(width, height) <= 100 * min(width, height):
            high, wide = qwen2_size(height, width, **bounds)
            assert {ours.resized(count, width, height) for count in (1, 7)} == {(wide, high)}


def test_times_are_written_as_by_transformers() -> None:
    """Qwen has the middle of a pair's times, or a single frame's time, GLM that of the first."""
    qwen, glm = Qwen3Video(placeholder=1), GlmVideo(placeholder=1, precise=True)
    assert re.findall("<([0-9.]+) seconds>", qwen.text(5, 2)) == ["0.2", "1.2", "2.0"]
    assert glm.text(5, 0.0642).count("<|image|>") == 3
    assert glm.text(5, 0.0642).endswith("<|end_of_image|>62.3 seconds")
    whole = GlmVideo(placeholder=1, precise=False)
    assert whole.text(5, 0.0642).endswith("<|end_of_image|>62")
    form = image_format(
        {"model_type": "gemma4", "vision_config": {"depth": 1}}, {}, {"a": 1}, {"a": 1}, NO_TOKENS
    )
    assert form is not None and form.video is not None
    assert form.video.text(2, 0.016) == "00:00 <|video|> 01:02 <|video|>"


@pytest.mark.parametrize("rate", [2, 4, 25])
def test_positions_count_time_as_by_transformers(rate: int) -> None:
    """In Qwen2.5-VL, with the arithmetic of get_vision_position_ids."""
    for fps in (0.3, 0.7, 1, 1.9, 2, 3, 3.7, 4, 6, 6.6, 7, 12, 24, 29.97, 30, 60):
        video = Qwen2Video(placeholder=1, positions_per_second=rate, min_pixels=28**4)
        groups = group_frames(video, [b""] * 64, fps, 28, 28)
        wanted = (torch.arange(32) * (rate * torch.tensor(2 / fps))).long().tolist()
        assert [group.time for group, _ in groups] == wanted, fps
        assert [group.number for group, _ in groups] == list(range(32))


def test_positions_of_qwen2_count_groups() -> None:
    groups = group_frames(
        Qwen2Video(placeholder=1, positions_per_second=None), [b""] * 5, 9, 28, 28
    )
    assert [(group.number, group.time) for group, _ in groups] == [(0, 0), (1, 1), (2, 2)]


def test_videos_with_more_positions_than_tokens_are_refused() -> None:
    video = Qwen2Video(placeholder=1, positions_per_second=2, min_pixels=28 * 28)
    with pytest.raises(
        ImageError, match="0.5 frames a second .* more than 8 positions, .* have 2 tokens"
    ):
        group_frames(video, [b""] * 4, 0.5, 56, 28)


def test_smolvlm_has_the_text_of_transformers() -> None:
    video = smolvlm_video()
    intro = DEFAULT_VIDEO_INTRO.format(frame_count="sixty-two", video_duration="0:01:02")
    text = video.text(62, 1)
    assert text.startswith(intro + FRAME_TIMESTAMP_MESSAGE.format(timestamp="00:00") + "<image>")
    last = FRAME_TIMESTAMP_MESSAGE.format(timestamp="01:01") + "<image>"
    assert text.endswith(last + DEFAULT_MEDIA_OUTTRO)
    assert text.count("<image>") == 62


def smolvlm_video() -> VideoFormat:
    config = {"model_type": "smolvlm", "image_token_id": 1}
    form = image_format(
        config, {}, {"size": {"longest_edge": 64}}, {"size": {"longest_edge": 64}}, NO_TOKENS
    )
    assert form is not None and form.video is not None
    return form.video


def test_a_smolvlm_without_sampling_of_videos_reads_none() -> None:
    config = {"model_type": "smolvlm", "image_token_id": 1}
    form = image_format(config, {}, {"size": {"longest_edge": 64}}, {}, NO_TOKENS)
    assert form is not None and form.video is None


def test_numbers_are_written_as_by_num2words() -> None:
    """What num2words 0.5.14 prints."""
    printed = {
        1: "one",
        13: "thirteen",
        20: "twenty",
        64: "sixty-four",
        100: "one hundred",
        101: "one hundred and one",
        999: "nine hundred and ninety-nine",
        1000: "one thousand",
        1024: "one thousand and twenty-four",
        1100: "one thousand, one hundred",
    }
    assert {number: in_words(number) for number in printed} == printed


def test_the_last_frame_of_llava_onevision_ends_the_video() -> None:
    config = {"model_type": "llava_onevision", "image_token_id": 1, "video_token_index": 2}
    form = image_format(config, {}, {"size": {}}, {}, NO_TOKENS)
    assert form is not None and form.video is not None
    groups = group_frames(form.video, [b"a", b"b"], 1, 640, 480)
    assert [len(layout.token_ids) for _, layout in groups] == [14**2, 14**2 + 1]
    assert [group.last for group, _ in groups] == [False, True]
    assert form.video.text(2, 1) == "<video><video>"


def test_only_frames_are_read_as_frames() -> None:
    group = FrameGroup(width=32, height=64, frames=[b"one", b"two"], number=2, time=9, last=True)
    assert decode_frames(group.encode()) == group
    assert decode_frames(b"\x89PNG") is None
    with pytest.raises(ImageError, match="damaged"):
        decode_frames(group.encode()[:-1])
    with pytest.raises(ImageError, match="damaged"):
        decode_frames(group.encode() + b"x")
