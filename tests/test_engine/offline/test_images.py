"""Images in the offline API: in prompts, in conversations, and refused by name."""

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headrace_engine import LLM, SamplingParams
from headrace_engine.core.errors import RequestError
from headrace_testing.image_prompts import IMAGE_TOKEN, ImagePrompts, noise, save_chat_model

CheckpointMaker = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("images"), "qwen2.5-vl")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_blocks": 256}
    return LLM(str(folder), max_num_seqs=8, max_num_batched_tokens=64, **options)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> ImagePrompts:
    return ImagePrompts(folder)


def greedy(llm: LLM, **options: Any) -> SamplingParams:
    bias = {placeholder(llm): -100.0}
    return SamplingParams(temperature=0.0, max_tokens=8, min_tokens=8, logit_bias=bias, **options)


def placeholder(llm: LLM) -> int:
    found = llm.get_tokenizer().token_to_id(IMAGE_TOKEN)
    assert found is not None
    return found


def parts(llm: LLM, text: str, *images: Image.Image) -> list[int | Image.Image]:
    """The prompt as ids and images."""
    ids, left = llm.get_tokenizer().encode(text), iter(images)
    return [next(left) if each == placeholder(llm) else each for each in ids]


def test_prompts_have_an_image_for_each_placeholder(llm: LLM, prompts: ImagePrompts) -> None:
    one, other = noise(24, 16), noise(16, 40, 1)
    text = f"the cat {IMAGE_TOKEN} sat on {IMAGE_TOKEN} the mat"
    asked: list[Any] = [
        {"prompt": f"the cat {IMAGE_TOKEN} sat", "multi_modal_data": {"image": one}},
        {"prompt": text, "multi_modal_data": {"image": [np.asarray(one), other]}},
        {
            "prompt_token_ids": llm.get_tokenizer().encode(text),
            "multi_modal_data": {"image": [other, one]},
        },
        "the cat sat",
    ]
    outputs = llm.generate(asked, greedy(llm), use_tqdm=False)
    wanted = [
        parts(llm, f"the cat {IMAGE_TOKEN} sat", one),
        parts(llm, text, one, other),
        parts(llm, text, other, one),
        parts(llm, "the cat sat"),
    ]
    for output, prompt in zip(outputs, wanted, strict=True):
        prompts.check(prompt, output.outputs[0].token_ids)
    assert len(outputs[0].prompt_token_ids) == len(wanted[0]) - 1 + 6


def test_conversations_have_images(llm: LLM, prompts: ImagePrompts) -> None:
    picture, file = noise(32, 24, 5), io.BytesIO()
    picture.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    text = {"type": "text", "text": f"what is {IMAGE_TOKEN} this"}
    forms: list[Any] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
        {"type": "image_pil", "image_pil": picture},
    ]
    for form in forms:
        messages = [{"role": "user", "content": [form, text]}]
        (output,) = llm.chat(messages, greedy(llm), use_tqdm=False)
        ids = output.prompt_token_ids
        assert ids.count(placeholder(llm)) == 12, "that of the user's text is no placeholder"
        start = ids.index(placeholder(llm))
        prompt: list[int | Image.Image] = [*ids[:start], picture, *ids[start + 12 :]]
        prompts.check(prompt, output.outputs[0].token_ids)


def test_prompts_of_gemma_3_have_empty_lines_around_images(tmp_path: Path) -> None:
    begin, picture = "<start_of_image>", noise(30, 50)
    folder = save_chat_model(tmp_path / "g", "gemma3-multimodal", begin, "boi_token_index")
    llm = LLM(str(folder), dtype="float32", device="cpu", num_blocks=64)
    prompts, tokenizer = ImagePrompts(folder), llm.get_tokenizer()
    params = SamplingParams(
        temperature=0.0, max_tokens=8, min_tokens=8, logit_bias={prompts.image_token: -100.0}
    )
    text: list[Any] = [{"type": "text", "text": f"what is {begin} this"}]
    pictured: list[Any] = [{"type": "image_pil", "image_pil": picture}]
    messages = [{"role": "user", "content": text + pictured + text}]
    line: int = tokenizer.encode("\n\n")[0]
    (chat,) = llm.chat(messages, params, use_tqdm=False)
    prompt: Any = {"prompt": f"the cat {begin} sat", "multi_modal_data": {"image": picture}}
    (written,) = llm.generate(prompt, params, use_tqdm=False)
    for output in (chat, written):
        ids = list(output.prompt_token_ids)
        start, count = ids.index(prompts.image_token) - 1, ids.count(prompts.image_token) + 2
        assert ids[start - 1] == ids[start + count] == line
        whole: list[int | Image.Image] = [*ids[:start], picture, *ids[start + count :]]
        prompts.check(whole, output.outputs[0].token_ids)
        assert ids.count(line) == 2


def test_equal_images_are_encoded_once_for_each_salt(llm: LLM) -> None:
    def ask(salt: str) -> int:
        before = llm.llm_engine.model.engine.stats().images_encoded
        llm.generate(
            {
                "prompt": f"{salt} {IMAGE_TOKEN} sat",
                "multi_modal_data": {"image": noise(40, 40, 9)},
                "cache_salt": salt,
            },
            greedy(llm),
            use_tqdm=False,
        )
        return llm.llm_engine.model.engine.stats().images_encoded - before

    assert [ask(salt) for salt in ("one", "one", "two")] == [1, 0, 1]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "x", "multi_modal_data": {"image": noise(8, 8)}}, "0 places for 1 images"),
        ({"prompt": IMAGE_TOKEN, "multi_modal_data": {"image": noise(8, 8)}}, "ends with an image"),
        ({"prompt": IMAGE_TOKEN, "multi_modal_data": {"audio": []}}, "only images and videos"),
        ({"prompt": IMAGE_TOKEN, "multi_modal_data": {"image": "x.png"}}, "must be one of PIL"),
        (
            {"prompt": f"{IMAGE_TOKEN}x", "multi_modal_data": {"image": noise(1, 300)}},
            "over 200 times as long",
        ),
    ],
)
def test_wrong_images_are_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, greedy(llm), use_tqdm=False)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}, "is fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}, "cannot be read"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "not a PNG"),
        ({"type": "audio_url", "audio_url": {"url": "x"}}, "a part of type 'audio_url'"),
    ],
)
def test_wrong_parts_of_messages_are_refused(llm: LLM, part: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat([{"role": "user", "content": [part]}], greedy(llm), use_tqdm=False)


def test_a_prompt_with_images_is_not_truncated(llm: LLM) -> None:
    prompt: Any = {"prompt": f"{IMAGE_TOKEN} x", "multi_modal_data": {"image": noise(8, 8)}}
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        llm.generate(prompt, greedy(llm, truncate_prompt_tokens=4), use_tqdm=False)


def test_a_model_without_a_tower_refuses_images(checkpoint: CheckpointMaker) -> None:
    llm = LLM(str(checkpoint("llama")), dtype="float32", device="cpu", num_blocks=64)
    prompt: Any = {"prompt": "x", "multi_modal_data": {"image": noise(8, 8)}}
    with pytest.raises(RequestError, match="reads no images"):
        llm.generate(prompt, SamplingParams(), use_tqdm=False)
