"""Images and videos from the official client to the engine: greedy tokens and vectors equal
transformers', one picture is encoded once, and answers about them survive their engine."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import AsyncOpenAI
from PIL import Image
from torch.nn.functional import normalize

from headrace_testing.dual_encoders import Input, features, save_dual_encoder
from headrace_testing.image_prompts import ImagePrompts, Video, noise, png, save_chat_model, video
from headrace_testing.images import image_part, video_part
from headrace_testing.late_interaction import NAMES as LATE
from headrace_testing.late_interaction import Reference, save_late_interaction
from headrace_testing.processes import Starter, frozen, until
from headrace_testing.stack import MODEL, Stack

WORDS = ("the cat", "a mill", "one two", "tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("vision"), "qwen2.5-vl")


@pytest.fixture(scope="module")
def prompts(model: Path) -> ImagePrompts:
    return ImagePrompts(model)


@pytest.fixture
def vision(
    model: Path, tmp_path_factory: pytest.TempPathFactory, start: Starter
) -> Iterator[Stack]:
    with two_engines(model, tmp_path_factory.mktemp("images"), start) as stack:
        yield stack


@contextmanager
def two_engines(model: Path, folder: Path, start: Starter) -> Iterator[Stack]:
    """Two engines and a gateway; afterwards nothing may be left in the queue."""
    stack = Stack(model, folder, start=start)
    try:
        for _ in range(2):
            stack.add_engine()
        stack.add_gateway()
        stack.await_engines(2)
        yield stack
        until(stack.queue_is_empty, "the queue to be empty")
    finally:
        stack.close()


def part(shown: Image.Image | Video) -> dict[str, Any]:
    """A picture or a video as a part of a chat's message."""
    if isinstance(shown, Video):
        return video_part(*map(png, shown.frames))
    return image_part(png(shown))


class Answer:
    """A streamed answer to a message with an image or a video."""

    def __init__(self, prompts: ImagePrompts, shown: Image.Image | Video, words: str) -> None:
        self._prompts, self._shown, self._words = prompts, shown, words
        self.begun = asyncio.Event()
        self.prompt: list[int] = []
        self.tokens: list[int] = []

    async def read(self, client: AsyncOpenAI, length: int) -> None:
        content: list[Any] = [{"type": "text", "text": self._words}, part(self._shown)]
        content.append({"type": "text", "text": "and what is this"})
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": content}],
            stream=True,
            max_tokens=length,
            temperature=0.0,
            logit_bias={str(token): -100 for token in self._prompts.placeholders},
            extra_body={"return_token_ids": True, "ignore_eos": True, "min_tokens": length},
        )
        async for chunk in stream:
            more = chunk.model_dump()
            self.prompt = more.get("prompt_token_ids") or self.prompt
            for choice in more["choices"]:
                self.tokens += choice.get("token_ids") or ()
                self.begun.set()

    def check(self, length: int) -> None:
        """Compares the answer with transformers'."""
        assert len(self.tokens) == length
        runs = groupby(self.prompt, key=lambda token: token in self._prompts.placeholders)
        before, *between, after = [tuple(run) for shown, run in runs if not shown]
        shown = self._shown
        if isinstance(shown, Video):
            shown = replace(shown, between=(*between, ()))
        self._prompts.check([*before, shown, *after], self.tokens)


async def test_the_official_client_sends_pictures(vision: Stack, prompts: ImagePrompts) -> None:
    pictures = [noise(40, 32, 1), noise(24, 64, 2)]
    answers = [Answer(prompts, each, words) for each in pictures for words in WORDS]
    async with AsyncOpenAI(base_url=f"{vision.gateways[0].url}/v1", api_key="none") as client:
        await asyncio.gather(*(answer.read(client, 12) for answer in answers))
    for answer in answers:
        answer.check(12)


async def test_answers_about_a_picture_survive_their_engine(
    vision: Stack, prompts: ImagePrompts
) -> None:
    answers = [Answer(prompts, noise(40, 32, 3), words) for words in WORDS]
    await survive(vision, answers)
    for answer in answers:
        answer.check(300)


async def survive(stack: Stack, answers: list[Answer]) -> None:
    """Reads 300 tokens of each answer, whose engine ends after the first of them."""
    dying, other = stack.engines
    async with AsyncOpenAI(base_url=f"{stack.gateways[0].url}/v1", api_key="none") as client:
        with frozen([other]):
            reading = [asyncio.create_task(answer.read(client, 300)) for answer in answers]
            await asyncio.gather(*(answer.begun.wait() for answer in answers))
            await asyncio.to_thread(stack.retire, dying)
        await asyncio.gather(*reading)


def test_answers_about_a_video_survive_their_engine(tmp_path: Path, start: Starter) -> None:
    model = save_chat_model(tmp_path / "model", "qwen3-vl")
    prompts = ImagePrompts(model)
    answers = [Answer(prompts, video(5, 40, 32, 5), words) for words in WORDS]
    with two_engines(model, tmp_path / "stack", start) as stack:
        asyncio.run(survive(stack, answers))
    for answer in answers:
        answer.check(300)


@contextmanager
def embedding(model: Path, folder: Path, start: Starter) -> Iterator[Stack]:
    """An engine that embeds, and a gateway."""
    stack = Stack(model, folder, start=start)
    try:
        stack.add_engine("--task", "embed")
        stack.add_gateway()
        stack.await_engines(1)
        yield stack
        until(stack.queue_is_empty, "the queue to be empty")
    finally:
        stack.close()


def test_vectors_of_pictures_are_stored(
    model: Path, prompts: ImagePrompts, tmp_path: Path, start: Starter
) -> None:
    picture = noise(40, 32, 4)
    content = [
        part(picture),
        {"type": "text", "text": "the cat"},
    ]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    with embedding(model, tmp_path, start) as stack:
        url, headers = stack.gateways[0].url, {"idempotency-key": "one"}
        answer, again = [
            httpx.post(f"{url}/v1/embeddings", json=body, headers=headers, timeout=60)
            for _ in range(2)
        ]
        shown = httpx.post(f"{url}/tokenize", json={**body, "add_generation_prompt": False})
    assert answer.status_code == 200, answer.text
    assert again.content == answer.content
    assert answer.json()["usage"]["prompt_tokens"] == shown.json()["count"]
    ids = shown.json()["tokens"]
    begin, count = ids.index(prompts.image_token), ids.count(prompts.image_token)
    states = prompts.states([*ids[:begin], picture, *ids[begin + count :]])
    found = torch.tensor(answer.json()["data"][0]["embedding"])
    torch.testing.assert_close(found, normalize(states[-1], dim=0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", LATE)
def test_queries_and_pages_have_a_vector_for_each_token(
    name: str, tmp_path: Path, start: Starter
) -> None:
    model = save_late_interaction(tmp_path / name, name)
    reference, picture, text = Reference(model), noise(40, 32, 4), "cat sat on"
    image = part(picture)
    asked: list[tuple[dict[str, Any], torch.Tensor]] = [
        ({"messages": [{"role": "user", "content": [image]}]}, reference.of_image(picture)),
        ({"input": [text]}, reference.of_query(text)),
    ]
    with embedding(model, tmp_path, start) as stack:
        url = stack.gateways[0].url
        for fields, wanted in asked:
            answer = httpx.post(f"{url}/v1/embeddings", json={"model": MODEL, **fields}, timeout=60)
            assert answer.status_code == 200, answer.text
            found = torch.tensor(answer.json()["data"][0]["embedding"])
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_pictures_and_texts_have_vectors_in_one_space(tmp_path: Path, start: Starter) -> None:
    model = save_dual_encoder(tmp_path / "clip", "clip")
    picture = noise(40, 32, 4)
    image = part(picture)
    asked: list[tuple[dict[str, Any], Input]] = [
        ({"messages": [{"role": "user", "content": [image]}]}, picture),
        ({"input": [1, 9, 4, 2]}, [1, 9, 4, 2]),
    ]
    with embedding(model, tmp_path, start) as stack:
        url = stack.gateways[0].url
        for fields, one in asked:
            answer = httpx.post(f"{url}/v1/embeddings", json={"model": MODEL, **fields}, timeout=60)
            assert answer.status_code == 200, answer.text
            found = torch.tensor(answer.json()["data"][0]["embedding"])
            torch.testing.assert_close(found, features(model, "clip", one), atol=1e-5, rtol=1e-4)
