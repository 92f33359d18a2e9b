"""Videos as frames in the offline API: in prompts, in conversations, and refused by name."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_engine import LLM, SamplingParams
from headrace_engine.core.errors import RequestError
from headrace_testing.image_prompts import (
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    ImagePrompts,
    Prompt,
    Video,
    noise,
    png,
    save_chat_model,
    video,
)

PLACE = f"<|vision_start|>{VIDEO_TOKEN}<|vision_end|>"
CLIP = video(4, 24, 32, fps=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("videos"), "qwen2.5-vl")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", device="cpu", num_blocks=128)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> ImagePrompts:
    return ImagePrompts(folder)


def greedy(prompts: ImagePrompts) -> SamplingParams:
    bias = dict.fromkeys(prompts.placeholders, -100.0)
    return SamplingParams(temperature=0.0, max_tokens=8, min_tokens=8, logit_bias=bias)


def parts(prompts: ImagePrompts, ids: Sequence[int], *media: Any) -> Prompt:
    """The prompt as ids, images and videos, of which each has one run of placeholders."""
    found: list[Any] = []
    left = iter(media)
    for before, each in zip([0, *ids], ids, strict=False):
        if each not in prompts.placeholders:
            found.append(each)
        elif before != each:
            found.append(next(left))
    return found


def url(clip: Video) -> str:
    frames = ",".join(base64.b64encode(png(frame)).decode() for frame in clip.frames)
    return f"data:video/jpeg;base64,{frames}"


def test_prompts_have_videos_and_images_where_their_placeholders_are(
    llm: LLM, prompts: ImagePrompts
) -> None:
    picture, other = noise(24, 16, 9), video(3, 16, 24, 20, fps=4)
    array = np.stack([np.asarray(frame) for frame in CLIP.frames])
    asked: list[Any] = [
        ((list(CLIP.frames), {"fps": 2}), f"the cat {PLACE} sat", (CLIP,)),
        (
            [(array, {"fps": 2}), (other.frames, {"fps": 4})],
            f"a {PLACE} cat {PLACE} sat",
            (CLIP, other),
        ),
        ((other.frames, {"fps": 4}), f"the {PLACE} cat {IMAGE_TOKEN} sat", (other, picture)),
    ]
    for data, text, media in asked:
        given = {"video": data, **({"image": picture} if picture in media else {})}
        prompt: Any = {"prompt": text, "multi_modal_data": given}
        (output,) = llm.generate(prompt, greedy(prompts), use_tqdm=False)
        wanted = parts(prompts, output.prompt_token_ids, *media)
        prompts.check(wanted, output.outputs[0].token_ids)
        assert sum(not isinstance(each, int) for each in wanted) == len(media)


def test_conversations_have_videos(llm: LLM, prompts: ImagePrompts) -> None:
    content: list[Any] = [
        {"type": "text", "text": f"what is {PLACE} this"},
        {"type": "video_url", "video_url": {"url": url(CLIP)}},
    ]
    (output,) = llm.chat(
        [{"role": "user", "content": content}],
        greedy(prompts),
        use_tqdm=False,
        media_io_kwargs={"video": {"fps": 2}},
    )
    wanted = parts(prompts, output.prompt_token_ids, CLIP)
    prompts.check(wanted, output.outputs[0].token_ids)
    assert CLIP in wanted


def test_conversations_with_videos_of_smolvlm_have_their_text(tmp_path: Path) -> None:
    """Its template writes none."""
    folder = save_chat_model(tmp_path / "s", "smolvlm", "<image>")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% for p in m.content %}{{ p.text or '<image>' }}{% endfor %}"
        "{% endfor %} so"
    )
    llm = LLM(str(folder), dtype="float32", device="cpu", num_blocks=128)
    part = {"type": "video_url", "video_url": {"url": url(CLIP)}}
    (output,) = llm.chat(
        [{"role": "user", "content": [part]}], SamplingParams(max_tokens=1), use_tqdm=False
    )
    tokenizer = llm.get_tokenizer()
    text = tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert [text.count(token) for token in ("<global-img>", "<image>")] == [4, 4 * 4]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"video": ([], {"fps": 1})}, "a video must be a list"),
        ({"video": 5}, "a video must be a list"),
        ({"video": [noise(8, 8), noise(16, 8)]}, "have one size"),
        ({"video": ([noise(8, 8)], {"fps": 0})}, "from 1e-06 to 1000"),
        ({"video": ([noise(8, 8)], {"frames_indices": [0]})}, "only the option fps"),
        ({"video": [[noise(8, 8)]] * 2}, "1 places for 2 videos"),
        ({"video": [noise(8, 8)] * 8}, "send more or larger frames"),
        ({"video": [noise(8, 8)], "image": noise(8, 8)}, "0 for 1 images|0 places for 1 images"),
    ],
)
def test_wrong_videos_are_refused(llm: LLM, prompts: ImagePrompts, data: Any, message: str) -> None:
    prompt: Any = {"prompt": f"a {PLACE} b", "multi_modal_data": data}
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, greedy(prompts), use_tqdm=False)


@pytest.mark.parametrize(
    ("url", "message"),
    [("https://example.com/a.mp4", "must be data:video"), ("data:video/jpeg;base64,AA", "read")],
)
def test_wrong_urls_of_videos_are_refused(llm: LLM, url: str, message: str) -> None:
    part = {"type": "video_url", "video_url": {"url": url}}
    with pytest.raises(RequestError, match=message):
        llm.chat([{"role": "user", "content": [part]}], use_tqdm=False)


@pytest.mark.parametrize("given", [{"image": {}}, {"video": {"num_frames": 3}}, 5])
def test_wrong_options_of_videos_are_refused(llm: LLM, given: Any) -> None:
    with pytest.raises(RequestError, match="fps"):
        llm.chat([{"role": "user", "content": "a"}], use_tqdm=False, media_io_kwargs=given)


def test_prompts_of_token_ids_have_no_videos(llm: LLM) -> None:
    prompt: Any = {"prompt_token_ids": [5, 6], "multi_modal_data": {"video": [noise(8, 8)] * 2}}
    with pytest.raises(RequestError, match="must be a text"):
        llm.generate(prompt, use_tqdm=False)


def test_prompts_with_both_need_two_placeholders(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "g", "glm4v", "<|image|>")
    llm = LLM(str(folder), dtype="float32", device="cpu", num_blocks=64)
    data = {"video": [noise(16, 16)] * 2, "image": noise(16, 16)}
    prompt: Any = {"prompt": "<|video|><|image|>", "multi_modal_data": data}
    with pytest.raises(RequestError, match="one placeholder for images and videos"):
        llm.generate(prompt, use_tqdm=False)


def test_a_model_without_videos_says_so(tmp_path: Path) -> None:
    llm = LLM(
        str(save_chat_model(tmp_path / "m", "mistral3-multimodal")),
        dtype="float32",
        device="cpu",
        num_blocks=64,
    )
    prompt: Any = {"prompt": "x", "multi_modal_data": {"video": [noise(8, 8)]}}
    with pytest.raises(RequestError, match="reads no videos"):
        llm.generate(prompt, use_tqdm=False)
