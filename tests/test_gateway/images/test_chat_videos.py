"""Videos as frames: official clients send them, and prompts have a place for each group of frames
with its time; what cannot be read is refused by name."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from headrace_common.images.frames import FrameGroup
from headrace_common.wire.images import image_digest
from headrace_testing.gateway import ANSWER, MODEL, Gateway, prompt_of, serve
from headrace_testing.images import (
    VIDEO_TOKEN,
    VISION_TEMPLATE,
    image_part,
    picture,
    video_part,
    write_vision_checkpoint,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

VIDEOS = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 32},
}
FRAMES = [picture(56, 56, "JPEG", shade) for shade in range(6)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder = write_vision_checkpoint(tmp_path_factory.mktemp("videos"), videos=VIDEOS)
    async with serve(folder, max_images=6) as running:
        yield running


def shown(seconds: float, tokens: int) -> str:
    return f"<{seconds} seconds><|vision_start|>{VIDEO_TOKEN * tokens}<|vision_end|>"


def user(*parts: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


async def test_openais_sdk_sends_a_video(vision: Gateway) -> None:
    async with AsyncOpenAI(base_url=f"{vision.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=user({"type": "text", "text": "See"}, video_part(*FRAMES[:3])),
            extra_body={"media_io_kwargs": {"video": {"fps": 2}}},
        )

    assert answer.choices[0].message.content == ANSWER
    (request,) = vision.engine.submitted
    assert f"See{shown(0.2, 4)}{shown(1.0, 4)}" in prompt_of(vision)
    groups = [FRAMES[:2], FRAMES[2:3]]
    for image, frames in zip(request.images, groups, strict=True):
        encoded = FrameGroup(width=56, height=56, frames=frames).encode()
        assert (image.length, image.grid) == (4, (1, 4, 4))
        assert image.data is not None and image.data.encoded == encoded
        assert image.digest == image_digest(encoded, b"")


async def test_models_tell_that_they_read_videos(vision: Gateway) -> None:
    (listed,) = (await vision.http.get("/v1/models")).json()["data"]
    assert listed["architecture"] == {"input_modalities": ["text", "image", "video"]}


async def test_videos_and_images_keep_their_order(vision: Gateway) -> None:
    parts = [image_part(picture(112, 56)), video_part(*FRAMES[:2]), video_part(*FRAMES[2:4])]
    answer = await vision.chat(messages=user(*parts))
    assert answer.status_code == 200, answer.text

    (request,) = vision.engine.submitted
    assert [image.grid for image in request.images] == [(1, 4, 8), (1, 4, 4), (1, 4, 4)]
    assert prompt_of(vision).count(shown(0.5, 4)) == 2


async def test_frames_of_long_videos_become_smaller(vision: Gateway) -> None:
    large = [picture(168, 168, "JPEG", shade) for shade in range(4)]
    for count in (2, 4):
        await vision.chat(messages=user(video_part(*large[:count])))
    few, many = vision.engine.submitted
    assert [image.grid for image in few.images] == [(1, 8, 8)]
    assert [image.grid for image in many.images] == [(1, 4, 4)] * 2


WRONG: list[tuple[str, Any, str, str]] = [
    ("an mp4", "data:video/mp4;base64,AAAA", "invalid_video", "take the frames out"),
    ("an address", "http://127.0.0.1/a.mp4", "invalid_video", "take the frames out"),
    ("one frame", video_part(FRAMES[0]), "invalid_video", "reads 2 frames"),
    ("two sizes", video_part(FRAMES[0], picture(28, 28)), "invalid_video", "have one size"),
    ("too many", video_part(*FRAMES, FRAMES[0]), "too_many_images", "7 images"),
    ("no frame", "data:video/jpeg;base64,", "invalid_image", r"url\[0\]: it is not a PNG"),
    ("a text", video_part(FRAMES[0], b"text"), "invalid_image", r"url\[1\]: it is not a PNG"),
]


@pytest.mark.parametrize(
    ("part", "code", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG]
)
async def test_what_is_no_video_is_refused(
    vision: Gateway, part: Any, code: str, message: str
) -> None:
    if isinstance(part, str):
        part = {"type": "video_url", "video_url": {"url": part}}
    answer = await vision.chat(messages=user(part))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert error["param"].startswith("messages[0].content[0].video_url.url")
    assert re.search(message, error["message"]), error["message"]


@pytest.mark.parametrize(
    "given", [{"fps": 0}, {"fps": 1e-9}, {"fps": "2"}, {"fps": 1, "num_frames": 3}]
)
async def test_wrong_frame_rates_are_refused(vision: Gateway, given: dict[str, Any]) -> None:
    messages = user(video_part(*FRAMES[:2]))
    answer = await vision.chat(messages=messages, media_io_kwargs={"video": given})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("media_io_kwargs.video.")


async def test_a_model_without_videos_says_so(tmp_path: Path) -> None:
    async with serve(write_vision_checkpoint(tmp_path)) as gateway:
        answer = await gateway.chat(messages=user(video_part(*FRAMES[:2])))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_parameter")
    assert "reads text and images only" in error["message"]


async def test_texts_cannot_write_a_video(vision: Gateway) -> None:
    written = f"<|vision_start|>{VIDEO_TOKEN}<|vision_end|>"
    parts = [{"type": "text", "text": written}, video_part(*FRAMES[:2])]
    answer = await vision.chat(messages=user(*parts))
    assert answer.status_code == 200, answer.text
    (request,) = vision.engine.submitted
    assert len(request.images) == 1


async def test_a_video_of_qwen2_5_is_one_run_of_tokens(tmp_path: Path) -> None:
    """Its groups of frames know their place in time."""
    folder = write_vision_checkpoint(tmp_path, videos=VIDEOS, family="qwen2_5_vl")
    async with serve(folder) as gateway:
        kwargs = {"video": {"fps": 4}}
        messages = user(video_part(*FRAMES[:3]))
        answer = await gateway.chat(messages=messages, media_io_kwargs=kwargs)
        slow = await gateway.chat(messages=messages, media_io_kwargs={"video": {"fps": 0.5}})

        assert answer.status_code == 200, answer.text
        assert f"<|vision_start|>{VIDEO_TOKEN * 8}<|vision_end|>" in prompt_of(gateway)
        (request,) = gateway.engine.submitted
        wanted = [
            FrameGroup(
                width=56, height=56, frames=FRAMES[:3][first : first + 2], number=at, time=2 * at
            )
            for at, first in enumerate((0, 2))
        ]
        assert [image.data and image.data.encoded for image in request.images] == [
            group.encode() for group in wanted
        ]
    error = slow.json()["error"]
    assert (slow.status_code, error["code"]) == (400, "invalid_video")
    assert "send more or larger frames" in error["message"]


async def test_a_video_of_llava_onevision_ends_with_a_token(tmp_path: Path) -> None:
    folder = write_vision_checkpoint(
        tmp_path,
        processor={"size": {"height": 384, "width": 384}},
        videos=VIDEOS,
        family="llava_onevision",
        chat_template=VISION_TEMPLATE.replace(
            "<|vision_start|><|video_pad|><|vision_end|>", "<video>"
        ),
        tokens=["<image>", "<video>"],
    )
    async with serve(folder) as gateway:
        answer = await gateway.chat(messages=user(video_part(*FRAMES[:2])))
        assert answer.status_code == 200, answer.text
        assert prompt_of(gateway).count("<video>") == 2 * 14**2 + 1
        (request,) = gateway.engine.submitted
        assert [image.length for image in request.images] == [14**2, 14**2 + 1]


async def test_videos_of_smolvlm_need_no_place_in_the_template(tmp_path: Path) -> None:
    """The published templates write texts and images only. Texts cannot write a place either."""
    image = "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    rows = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    video = "{% elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    folder = write_vision_checkpoint(
        tmp_path,
        processor={
            "size": {"longest_edge": 128},
            "max_image_size": {"longest_edge": 64},
            "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 64}},
        },
        family="smolvlm",
        chat_template=VISION_TEMPLATE.replace(image, "{{ '<image>' }}").replace(video, ""),
        tokens=["<image>", "<fake_token_around_image>", "<global-img>", *rows],
    )
    async with serve(folder) as gateway:
        parts = [{"type": "text", "text": "<global-img> See "}, video_part(*FRAMES[:2])]
        answer = await gateway.chat(messages=user(*parts))
        assert answer.status_code == 200, answer.text
        frame = f"<fake_token_around_image><global-img>{'<image>' * 12}<fake_token_around_image>"
        assert (
            "<global-img> See You are provided the following series of two frames from a 0:00:02 "
            f"[H:MM:SS] video.\n\nFrame from 00:00:{frame}\nFrame from 00:01:{frame}\n\n"
        ) in prompt_of(gateway)
        (request,) = gateway.engine.submitted
        assert [image.length for image in request.images] == [15, 15]
