"""The bundled vision model: most of its answers are right, the engine says what transformers says,
and it is trained on what the engine and its chat template show it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoImageProcessor, AutoTokenizer, SmolVLMForConditionalGeneration

from drawings import COUNTS, MOST_DIGITS, MOST_GROUPS, MOST_SHAPES, NAMES, draw_number, draw_shapes
from headrace_common.text.checkpoint import DEMO_VISION, demo_folder
from headrace_engine import LLM
from picture_questions import describe
from review_vision import MAX_NEW_TOKENS, answers, kinds
from train_vision import LEARNING_RATE, optimizer
from vision import (
    HIDDEN,
    IMAGE,
    Batch,
    Conversation,
    Pool,
    Said,
    batch_of,
    converse,
    encode,
    loss_of,
    new_model,
    pixels_of,
    save,
)

FOLDER = demo_folder(DEMO_VISION)
LIMIT_BYTES = 3_000_000
PER_KIND = 25
STEPS = 12


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(DEMO_VISION, num_blocks=256)


@pytest.mark.parametrize("kind", kinds(0))
def test_most_questions_about_unseen_pictures_are_answered(llm: LLM, kind: str) -> None:
    asked = kinds(PER_KIND)[kind]
    said = answers(llm, asked)
    right = sum(text == turn.reply for text, (_, turn) in zip(said, asked, strict=True))
    assert right >= 0.8 * PER_KIND


def test_the_files_are_small_and_as_training_writes_them(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save(new_model(tokenizer).bfloat16(), tokenizer, tmp_path / "new")
    written = {file.name: file for file in (tmp_path / "new").iterdir()}
    assert {file.name for file in FOLDER.iterdir()} == written.keys()
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= LIMIT_BYTES
    for name, file in written.items():
        if name != "model.safetensors":
            assert json.loads((FOLDER / name).read_text()) == json.loads(file.read_text())


def image_processor() -> Any:
    kind: Any = AutoImageProcessor
    return kind.from_pretrained(FOLDER, backend="pil")


def test_the_engine_says_what_transformers_says(tokenizer: Tokenizer) -> None:
    rng = random.Random("the engine")
    pictures = [draw_shapes(rng), draw_number(rng)]
    asked = [(picture, describe(rng, picture)) for picture in pictures]
    said = answers(LLM(DEMO_VISION, dtype="float32", num_blocks=64), asked)
    model: Any = SmolVLMForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32)
    processor = image_processor()
    for (picture, turn), text in zip(asked, said, strict=True):
        example = encode(tokenizer, Conversation((Said(turn, picture),)))
        prompt = torch.tensor([example.ids[: example.written[0]]])
        pixels = processor(images=[picture.image], return_tensors="pt")["pixel_values"]
        ids = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            pixel_values=pixels,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
        )
        assert tokenizer.decode(ids[0, prompt.shape[1] :].tolist()) == text


def test_conversations_are_trained_on_as_the_chat_template_writes_them() -> None:
    template: Any = AutoTokenizer.from_pretrained(FOLDER)
    rng = random.Random("templates")
    pool = Pool()
    for _ in range(20):
        conversation = converse(rng, pool.show)
        messages: list[Any] = [{"role": "system", "content": conversation.system}][
            : bool(conversation.system)
        ]
        for said in conversation.said:
            parts: list[Any] = [{"type": "image"}] if said.picture else []
            text = {"type": "text", "text": said.turn.prompt}
            content = [text, *parts] if said.text_first else [*parts, text]
            messages += [
                {"role": "user", "content": content},
                {"role": "assistant", "content": said.turn.reply},
            ]
        written = "".join(text for text, _ in conversation.parts)
        assert written == template.apply_chat_template(messages, tokenize=False)
        assert written.count(IMAGE) == sum(said.picture is not None for said in conversation.said)


def test_pictures_are_trained_on_as_the_processor_makes_them() -> None:
    processor = image_processor()
    picture = draw_number(random.Random(1)).image.resize((192, 192))
    made = processor(images=[picture], return_tensors="np")["pixel_values"][0, 0]
    bytes_ = ((made + 1) * 127.5).round().transpose(1, 2, 0)
    assert (bytes_ == pixels_of(picture)).all()


def batch(tokenizer: Tokenizer) -> tuple[list[Said], Batch]:
    rng = random.Random("batches")
    pictures = [draw_shapes(rng) for _ in range(8)]
    said = [Said(describe(rng, picture), picture) for picture in pictures]
    return said, batch_of([encode(tokenizer, Conversation((each,))) for each in said])


def test_a_batch_has_the_name_of_each_centre_and_the_written_tokens(tokenizer: Tokenizer) -> None:
    said, made = batch(tokenizer)
    for (_, picture, _), names in zip(said, made.names, strict=True):
        found = sorted(name for name in names.tolist() if name < len(NAMES))
        assert picture and found == sorted(name for _, _, name in picture.centres)
    assert (made.ids.flatten()[made.places + 1] == made.labels).all()
    written = tokenizer.decode(made.labels.tolist(), skip_special_tokens=False)
    assert written == "".join(f"{each.turn.reply}<|im_end|>" for each in said)


def test_steps_of_training_lower_both_parts_of_the_loss(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    _, made = batch(tokenizer)
    model, namer = new_model(tokenizer), torch.nn.Linear(HIDDEN, len(NAMES) + 1)
    change = optimizer(model, namer)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, made, namer)
        torch.autograd.backward(loss)
        change.step(LEARNING_RATE)
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_pictures_are_as_their_description_says() -> None:
    rng = random.Random("drawings")
    for _ in range(200):
        picture = draw_shapes(rng)
        assert 1 <= len(picture.groups) <= MOST_GROUPS
        assert sum(group.count for group in picture.groups) == len(picture.centres) <= MOST_SHAPES
        assert MOST_SHAPES < len(COUNTS)
        for x, y, _ in picture.centres:
            at = int(x * picture.image.width), int(y * picture.image.height)
            pixel: Any = picture.image.getpixel(at)
            assert min(pixel) < 160  # a shape, not the ground
        digits = draw_number(rng).digits
        assert digits.isdigit() and len(digits) <= MOST_DIGITS
