"""The tokens of images in a prompt."""

import pytest

from headrace_common.images.formats import image_format
from headrace_common.images.layout import (
    NO_TOKENS,
    ImageError,
    ImageLayout,
    PlaceholderMismatch,
    PromptTokens,
    expand,
)
from headrace_common.images.qwen_vl import QwenVLImages
from headrace_common.wire.images import ImageSpan, image_digest

ONE, OTHER = image_digest(b"one", b""), image_digest(b"other", b"")
PAD = 9
TOKENS = PromptTokens(lambda _: PAD, lambda _: ())


def layout(*token_ids: int) -> ImageLayout:
    return ImageLayout(token_ids=token_ids, grid=(1, 2, 2))


def test_each_placeholder_becomes_the_tokens_of_its_image() -> None:
    images = [(ONE, layout(PAD, PAD)), (OTHER, layout(PAD, 5, PAD))]

    ids, spans = expand({PAD}, [1, PAD, 2, PAD], images)

    assert ids == [1, PAD, PAD, 2, PAD, 5, PAD]
    assert spans == (
        ImageSpan(digest=ONE, start=1, length=2, grid=(1, 2, 2)),
        ImageSpan(digest=OTHER, start=4, length=3, grid=(1, 2, 2)),
    )


def test_a_prompt_without_images_stays_as_it_is() -> None:
    assert expand({PAD}, [1, 2], []) == ([1, 2], ())


@pytest.mark.parametrize("prompt", [[1, 2], [PAD, PAD]])
def test_places_and_images_must_be_equally_many(prompt: list[int]) -> None:
    with pytest.raises(PlaceholderMismatch):
        expand({PAD}, prompt, [(ONE, layout(PAD))])


def test_a_digest_depends_on_the_image_and_on_the_salt() -> None:
    digests = {image_digest(data, salt) for data in (b"a", b"b") for salt in (b"", b"x")}

    assert len(digests) == 4 and image_digest(b"a", b"x") in digests


def test_an_image_that_is_too_long_for_its_width_is_refused() -> None:
    with pytest.raises(ImageError, match="over 200 times"):
        QwenVLImages(placeholder=PAD).grid(2, 401)


def test_only_known_families_read_images() -> None:
    processor = {"patch_size": 14}
    qwen = {"model_type": "qwen2_5_vl"}

    assert image_format({"model_type": "llama"}, {}, processor, {}, TOKENS) is None
    assert image_format(qwen, {}, {}, {}, TOKENS) is None
    assert image_format(qwen, {}, processor, {}, NO_TOKENS) is None
    found = image_format({**qwen, "image_token_id": 7}, {}, processor, {}, TOKENS)
    assert found is not None and found.placeholder == 7


def test_the_newer_file_of_a_processor_takes_precedence() -> None:
    qwen, older = {"model_type": "qwen2_5_vl"}, {"patch_size": 14}

    newer = image_format(qwen, {"image_processor": {"patch_size": 28}}, older, {}, TOKENS)
    other = image_format(qwen, {"processor_class": "x"}, older, {}, TOKENS)
    assert newer is not None and newer.grid(112, 112) == (1, 4, 4)
    assert other is not None and other.grid(112, 112) == (1, 8, 8)
