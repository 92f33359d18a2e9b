"""The tokens of an image equal those of transformers' processor, for sizes on a grid."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import tokenizers
from PIL import Image
from tokenizers import AddedToken, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from headrace_common.images.formats import image_format
from headrace_common.images.layout import ImageError, ImageFormat, PromptTokens, expand
from headrace_common.text.errors import TokenizerError
from headrace_common.wire.images import image_digest

SIDES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 99, 128, 130, 250)
GEMMA = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
IDEFICS = (
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 9) for column in range(1, 9)),
)
MISTRAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")


@cache
def tokenizer() -> tokenizers.Tokenizer:
    """One in which several line breaks are one token, as in Gemma's and SmolLM's."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["\n" * 5, "a\n\nb", "\n\n\nuser\n\n\n\n"], trainer)
    names = (*GEMMA, *IDEFICS, *MISTRAL)
    backend.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names])
    return backend


def token(name: str) -> int:
    found = tokenizer().token_to_id(name)
    assert found is not None
    return found


def encode(text: str) -> Sequence[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def form_of(
    config: dict[str, Any], processor: dict[str, Any], image_processor: dict[str, Any]
) -> ImageFormat:
    tokens = PromptTokens(tokenizer().token_to_id, encode)
    found = image_format(
        config, processor, {"image_processor_type": "x", **image_processor}, {}, tokens
    )
    assert found is not None
    return found


def image(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height))


@pytest.mark.parametrize("patch", [4, 7])
@pytest.mark.parametrize("size", [{"longest_edge": 100}, {"height": 64, "width": 120}])
def test_mistral_3(size: dict[str, int], patch: int) -> None:
    config = {
        "model_type": "mistral3",
        "image_token_index": token("[IMG]"),
        "spatial_merge_size": 2,
        "vision_config": {"patch_size": patch},
    }
    ours = form_of(config, {}, {"size": size})
    theirs = PixtralImageProcessorPil(size=size, do_rescale=False, do_normalize=False)
    for width in SIDES:
        for height in SIDES:
            if max(width, height) >= 64 * min(width, height) or max(width, height) <= 2 * patch:
                continue
            made = theirs(
                images=[image(width, height)], return_tensors="np", **ours.processor_options
            )
            high, wide = (side // (2 * patch) for side in made["image_sizes"][0])
            text = "[IMG_BREAK]".join(["[IMG]" * wide] * high) + "[IMG_END]"
            assert list(ours.layout(width, height).token_ids) == encode(text), (width, height)


@pytest.mark.parametrize(("height", "message"), [(250, "one side is too short"), (32, "too few")])
def test_images_of_mistral_3_without_a_side_or_with_one_token_are_refused(
    height: int, message: str
) -> None:
    ours = form_of({"model_type": "mistral3"}, {}, {"size": {"longest_edge": 100}})
    with pytest.raises(ImageError, match=message):
        ours.grid(1, height)


@pytest.mark.parametrize(
    ("kind", "processor"),
    [
        ("glm4v", Glm4vImageProcessorPil),
        ("glm4v_moe", Glm46VImageProcessorPil),
        ("glm46v", Glm46VImageProcessorPil),
    ],
)
@pytest.mark.parametrize("size", [None, {"shortest_edge": 3000, "longest_edge": 30_000}])
def test_glm_4_1v_and_4_6v(kind: str, processor: Any, size: dict[str, int] | None) -> None:
    options = {"patch_size": 8, **({} if size is None else {"size": size})}
    ours, theirs = (
        form_of({"model_type": kind, "image_token_id": 7}, {}, options),
        processor(**options),
    )
    for width in SIDES:
        for height in SIDES:
            if max(width, height) > 200 * min(width, height):
                continue
            made = theirs(images=[image(width, height)], return_tensors="np")
            expected = tuple(made["image_grid_thw"][0].tolist())
            found = ours.layout(width, height)
            assert found.grid == expected, (width, height)
            assert list(found.token_ids) == [7] * (math.prod(expected) // 4)


@pytest.mark.parametrize("kind", ["idefics3", "smolvlm"])
@pytest.mark.parametrize("split", [True, False])
def test_idefics_3_and_smolvlm(kind: str, split: bool) -> None:
    options: dict[str, Any] = {
        "size": {"longest_edge": 96},
        "max_image_size": {"longest_edge": 32},
        "do_image_splitting": split,
    }
    config = {
        "model_type": kind,
        "image_token_id": token("<image>"),
        "scale_factor": 2,
        "vision_config": {"image_size": 32, "patch_size": 8},
    }
    ours = form_of(config, {}, options)
    theirs: Any = Idefics3ImageProcessorPil(**options)
    prompt: Any = get_image_prompt_string
    for width in SIDES:
        for height in SIDES:
            made = theirs(
                images=[image(width, height)], return_tensors="np", return_row_col_info=True
            )
            text = prompt(
                made["rows"][0][0],
                made["cols"][0][0],
                4,
                fake_token_around_image="<fake_token_around_image>",
                image_token="<image>",
                global_image_token="<global-img>",
            )
            found = ours.layout(width, height)
            assert list(found.token_ids) == encode(text), (width, height)
            assert found.grid[0] == made["pixel_values"].shape[1]


@pytest.mark.parametrize("tiles", [None, (1, 2, 3)])
@pytest.mark.parametrize("most", [1, 2, 9])
def test_llava_onevision(tiles: tuple[int, ...] | None, most: int) -> None:
    tile, side = (384, 27) if tiles is None else (32, 4)
    options: dict[str, Any] = {"size": {"height": tile, "width": tile}}
    if tiles is not None:
        canvases = [[tile * high, tile * wide] for high in tiles for wide in tiles]
        options["image_grid_pinpoints"] = canvases
    config = {
        "model_type": "llava_onevision",
        "image_token_index": token("<image>"),
        "vision_config": {"image_size": tile, "patch_size": tile // side},
    }
    ours = form_of(config, {"vision_aspect_ratio": f"anyres_max_{most}"}, options)
    kind: Any = LlavaOnevisionProcessor
    theirs = kind.__new__(kind)  # its __init__ needs a video processor, which needs torchvision
    theirs.image_processor = LlavaOnevisionImageProcessorPil(**options)
    theirs.num_image_tokens = side**2
    theirs.vision_aspect_ratio = f"anyres_max_{most}"
    for width in (*SIDES, 501, 1080):
        for height in (*SIDES, 501, 1080):
            count = theirs._get_number_of_features(height, width, tile, tile)
            found = ours.layout(width, height).token_ids
            assert list(found) == [token("<image>")] * count, (width, height)


def test_the_number_of_tokens_of_a_square_may_be_the_processors() -> None:
    config = {"model_type": "smolvlm", "image_token_id": token("<image>")}
    ours = form_of(config, {"image_seq_len": 3}, {"do_image_splitting": False})
    assert list(ours.token_ids((1, 1, 1))).count(token("<image>")) == 3


@pytest.mark.parametrize("before", ["user", "user\n", "a\n\nb", ""])
@pytest.mark.parametrize("after", ["What?", "\n\nWhat?", ""])
def test_prompts_of_gemma_3(before: str, after: str) -> None:
    begin, soft, end = map(token, GEMMA)
    config = {
        "model_type": "gemma3",
        "boi_token_index": begin,
        "image_token_index": soft,
        "eoi_token_index": end,
        "mm_tokens_per_image": 9,
    }
    ours = form_of(config, {}, {})
    names = {"boi_token": GEMMA[0], "image_token": GEMMA[1], "eoi_token": GEMMA[2]}
    fast: Any = PreTrainedTokenizerFast
    theirs = Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(),
        tokenizer=fast(tokenizer_object=tokenizer(), extra_special_tokens=names),
        image_seq_length=9,
    )
    text = f"{before}<start_of_image>{after}"
    pictures = [image(20, 30)]
    (expected,) = theirs(text=[text], images=[pictures], add_special_tokens=False)["input_ids"]
    layouts = [(image_digest(b"", b""), ours.layout(20, 30))]
    ids, spans = expand(ours.placeholders, encode(ours.rewrite(text)), layouts)
    assert ids == list(expected)
    assert spans[0].length == 11 and math.prod(spans[0].grid) == 9


@pytest.mark.parametrize(
    "options",
    [{}, {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}],
)
def test_gemma_4(options: dict[str, Any]) -> None:
    begin, soft, end = map(token, GEMMA)
    config = {
        "model_type": "gemma4",
        "boi_token_id": begin,
        "image_token_id": soft,
        "eoi_token_id": end,
        "vision_config": {"patch_size": 16},
    }
    ours, theirs = form_of(config, {}, dict(options)), Gemma4ImageProcessorPil(**options)
    for width in (*SIDES, 1080)[:: 1 if options else 4]:
        for height in (*SIDES, 1080):
            try:
                made = theirs(images=[image(width, height)], return_tensors="np")
            except ValueError:
                with pytest.raises(ImageError, match="cannot be resized"):
                    ours.grid(width, height)
                continue
            count = int(made["num_soft_tokens_per_image"][0])
            found = ours.layout(width, height)
            assert list(found.token_ids) == [begin, *[soft] * count, end], (width, height)
            patches = made["image_position_ids"][0].max(axis=0) + 1
            assert found.grid == (1, patches[1], patches[0])


def test_gemma_4_without_a_tower_reads_no_images() -> None:
    processor = {"image_processor_type": "x"}
    tokens = PromptTokens(tokenizer().token_to_id, encode)
    assert image_format({"model_type": "gemma4"}, {}, processor, {}, tokens) is None


def test_a_token_that_the_tokenizer_lacks_is_named() -> None:
    ours = form_of({"model_type": "mistral3"}, {"image_end_token": "[NO]"}, {})
    with pytest.raises(TokenizerError, match=r"no token \[NO\]"):
        ours.token_ids((1, 2, 2))
