"""Runs clients' libraries against real processes, with a model that generates and two that embed.

Embeddings equal transformers', even if an engine dies meanwhile.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers

from headrace_common import demo_model
from headrace_testing.checkpoints import make_config, make_tokenizer
from headrace_testing.embedders import POSITIONS, hidden_states, normalized
from headrace_testing.embedders import save_embedder as save_encoder
from headrace_testing.needs import missing
from headrace_testing.processes import Starter, until
from headrace_testing.stack import Stack
from headrace_testing.tool_templates import CHATML_WITH_TOOLS
from headrace_testing.tours import shared
from headrace_testing.tours.shared import EMBEDDER

ENCODER = "encoder"
# Long and all different, so that an engine works on them for a while.
INPUTS = [[3 + (7 * i + (1 + i // 200) * j) % 200 for j in range(450)] for i in range(240)]


def save_embedder(folder: Path) -> Path:
    torch.manual_seed(5)
    build: Any = transformers.AutoModel
    build.from_config(make_config("qwen3"), dtype=torch.float32).save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare decoder, as embedding checkpoints are saved."""
    return save_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"), "xlm-roberta", "mean_tokens")


@pytest.fixture(scope="module")
def stack(
    embedder: Path, encoder: Path, tmp_path_factory: pytest.TempPathFactory, start: Starter
) -> Iterator[Stack]:
    """A gateway with an engine for each model; it finds all models but the first one in the
    queue."""
    folder = tmp_path_factory.mktemp("tours")
    template = folder / "template.jinja"
    template.write_text(CHATML_WITH_TOOLS)
    stack = Stack(Path(demo_model.__path__[0]), folder, start=start)
    try:
        stack.add_engine()
        stack.add_engine(*flags_of(embedder))
        stack.add_engine("--model", str(encoder), "--served-model-name", ENCODER)
        gateway = stack.add_gateway("--chat-template", str(template), "--reasoning-parser", "none")
        stack.await_engines(1)
        until(lambda: {EMBEDDER, ENCODER} <= _models(gateway.url), "all models")
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="module")
def url(stack: Stack) -> str:
    return stack.gateways[0].url


def flags_of(embedder: Path) -> tuple[str, ...]:
    return ("--model", str(embedder), "--served-model-name", EMBEDDER)


def _models(url: str) -> set[str]:
    return {model["id"] for model in httpx.get(f"{url}/v1/models", timeout=30).json()["data"]}


@pytest.mark.parametrize(
    ("tour", "package"),
    [
        ("openai_tour", "openai"),
        ("anthropic_tour", "anthropic"),
        ("litellm_tour", "litellm"),
        ("langchain_tour", "langchain_openai"),
    ],
)
def test_a_library_finds_what_it_expects(url: str, tour: str, package: str) -> None:
    if find_spec(package) is None:
        missing(f"{package}: install the extra sdks")
    support = str(Path(shared.__file__).parents[2])
    ended = subprocess.run(
        [sys.executable, "-m", f"headrace_testing.tours.{tour}", url],
        env={**os.environ, "PYTHONPATH": support},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_text_from_a_model_that_embeds_is_refused(url: str) -> None:
    body = {"model": EMBEDDER, "prompt": [5]}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "request_invalid")
    assert "use /v1/embeddings" in error["message"]


def test_an_encoder_embeds_prompts_up_to_its_number_of_positions(url: str, encoder: Path) -> None:
    prompts = [[7, 8, 9], [5] * POSITIONS]

    def ask(inputs: list[list[int]]) -> httpx.Response:
        body = {"model": ENCODER, "input": inputs}
        return httpx.post(f"{url}/v1/embeddings", json=body, timeout=60)

    for prompt, item in zip(prompts, ask(prompts).json()["data"], strict=True):
        wanted = normalized(hidden_states(encoder, prompt).mean(dim=0))
        np.testing.assert_allclose(item["embedding"], wanted, atol=1e-5)
    refused = ask([[7], [5] * (POSITIONS + 1)])
    assert (refused.status_code, refused.json()["error"]["code"]) == (
        400,
        "context_length_exceeded",
    )


def test_vectors_equal_transformers_after_an_engine_dies(stack: Stack, embedder: Path) -> None:
    stack.add_engine(*flags_of(embedder)).await_log("engine ready")
    first = stack.engines[1]

    async def ask() -> list[list[float]]:
        killed = asyncio.Event()

        async def until_killed(http: httpx.AsyncClient) -> httpx.Response:
            while True:
                answer = await http.post(
                    "/v1/embeddings", json={"model": EMBEDDER, "input": INPUTS}
                )
                if killed.is_set():
                    return answer

        async with httpx.AsyncClient(base_url=stack.gateways[0].url, timeout=60) as http:
            asking = asyncio.create_task(until_killed(http))
            busy = partial(until, lambda: first.metric("headrace_engine_requests") > 0, "work")
            await asyncio.to_thread(busy)
            stack.retire(first)
            killed.set()
            return [item["embedding"] for item in (await asking).json()["data"]]

    vectors = asyncio.run(ask())

    assert len(vectors) == len(INPUTS)
    for index in range(0, len(INPUTS), 24):
        wanted = expected(embedder, INPUTS[index]).numpy()
        np.testing.assert_allclose(vectors[index], wanted, atol=2e-5)
    until(lambda: stack.engines[-1].idle, "the engine to hold nothing")


def expected(folder: Path, prompt: list[int]) -> torch.Tensor:
    load: Any = transformers.AutoModel.from_pretrained
    model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        last: torch.Tensor = model(torch.tensor([prompt])).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(last, dim=0)
