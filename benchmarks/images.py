"""Measures what requests about one picture share, and what a vision tower costs text requests.

    PYTHONPATH=tests/support python benchmarks/images.py [--requests 64] [--rounds 5]

First, on real processes (Valkey, a gateway, an engine): in each round, as many requests at once
about one new picture as about pictures that are all different, in turns. Then in this process: text
requests to the same checkpoint and to a text model with the same weights, in turns. Figures are
medians of the rounds, with the least and the largest. Prints Markdown tables.
"""

import argparse
import asyncio
import io
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from headrace_engine import LLM, SamplingParams
from headrace_testing.checkpoints import VOCAB
from headrace_testing.image_prompts import noise, save_chat_model
from headrace_testing.images import data_url
from headrace_testing.stack import MODEL, Stack

ONE, DISTINCT = "one picture", "distinct pictures"
WITH_TOWER, TEXT_ONLY = "with a vision tower", "text only"
WORDS = ("the", "cat", "one", "two", "mill", "moon", "tokens", "blocks")
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER: dict[str, Any] = {
    "depth": 8,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_heads": 8,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [3, 7],
    "out_hidden_size": 512,
}
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
}


class Round(NamedTuple):
    """Seconds of all requests, and what was done in them."""

    seconds: float
    decoded: float
    encoded: float
    encoding: float  # seconds


def save_models(folder: Path, *, tiny: bool) -> tuple[Path, Path]:
    """A random Qwen2.5-VL, of 42 M parameters without its tower, and a text model with the same
    weights; with `tiny` of the size of tests."""
    options: dict[str, Any] = {}
    if not tiny:
        rotations = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
        text_config = {**SHAPE, "rope_parameters": rotations}
        options = {"text_config": text_config, "vision_config": TOWER, "dtype": torch.bfloat16}
    vision = save_chat_model(folder / "vision", "qwen2.5-vl", **options)
    if not tiny:
        (vision / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return vision, _text_model(vision, folder / "text")


def _text_model(vision: Path, folder: Path) -> Path:
    folder.mkdir()
    tensors = load_file(vision / "model.safetensors")
    text = {name: each for name, each in tensors.items() if not name.startswith("visual.")}
    save_file(text, folder / "model.safetensors", {"format": "pt"})
    given = json.loads((vision / "config.json").read_text())
    fields = {name: given.get("text_config", given)[name] for name in SHAPE}
    config = transformers.Qwen2Config(**fields, tie_word_embeddings=False)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    shutil.copy(vision / "tokenizer.json", folder)
    return folder


# Pictures, through all processes


class Pictures:
    """Asks an engine about pictures, through a gateway."""

    def __init__(self, stack: Stack, side: int, output: int) -> None:
        self._stack, self._side, self._output = stack, side, output
        self._made = 0

    async def measure(self, requests: int, distinct: bool) -> Round:
        pictures = [self._picture() for _ in range(requests if distinct else 1)]
        urls = pictures if distinct else pictures * requests
        bodies = [self._body(url, Random(number)) for number, url in enumerate(urls)]
        before, begun = self._done(), time.perf_counter()
        async with httpx.AsyncClient(timeout=600, limits=httpx.Limits()) as client:
            url = f"{self._stack.gateways[0].url}/v1/chat/completions"
            await asyncio.gather(*(_answered(client, url, body) for body in bodies))
        seconds, after = time.perf_counter() - begun, self._done()
        return Round(seconds, *(new - old for new, old in zip(after, before, strict=True)))

    def _picture(self) -> str:
        self._made += 1
        out = io.BytesIO()
        picture = noise(32, 32, self._made).resize(
            (self._side, self._side), Image.Resampling.NEAREST
        )
        picture.save(out, "PNG")
        return data_url(out.getvalue())

    def _body(self, url: str, rng: Random) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": url}}
        text = {"type": "text", "text": " ".join(rng.choices(WORDS, k=24))}
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": [image, text]}],
            "max_tokens": self._output,
            "temperature": 0,
            "ignore_eos": True,
        }

    def _done(self) -> tuple[float, float, float]:
        engine, gateway = self._stack.engines[0], self._stack.gateways[0]
        text = httpx.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics", timeout=30).text
        decoded = [
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith("headrace_gateway_images_total") and 'result="decoded"' in line
        ]
        return (
            sum(decoded),
            engine.metric("headrace_engine_encoder_images_total"),
            engine.metric("headrace_engine_encoder_time_seconds_total"),
        )


async def _answered(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
    """Sends a request until it is answered: a gateway refuses images that would wait long."""
    while (answer := await client.post(url, json=body)).status_code == 429:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    answer.raise_for_status()


@contextmanager
def stack_of(model: Path, folder: Path, threads: int) -> Iterator[Stack]:
    stack = Stack(model, folder)
    try:
        # Room for all pictures of a round.
        stack.add_engine("--threads", str(threads), "--encoder-cache-memory", "1GiB")
        stack.add_gateway("--max-tenant-image-bytes", "256MiB", "--default-deadline", "600")
        stack.await_engines(1)
        yield stack
    finally:
        stack.close()


def measure_pictures(model: Path, folder: Path, given: argparse.Namespace) -> None:
    rounds: dict[str, list[Round]] = {ONE: [], DISTINCT: []}
    with stack_of(model, folder / "stack", given.threads) as stack:
        pictures = Pictures(stack, given.side, given.output_tokens)
        for turn in range(given.rounds + 1):
            for name in (ONE, DISTINCT) if turn % 2 else (DISTINCT, ONE):
                found = asyncio.run(pictures.measure(given.requests, name == DISTINCT))
                if turn:  # the first one warms the processes up
                    rounds[name].append(found)
    print(f"| {given.requests} requests about | seconds | decoded | encoded | encoding |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, own in rounds.items():
        seconds, encoding = [each.seconds for each in own], [each.encoding for each in own]
        counts = f"{median(r.decoded for r in own):.0f} | {median(r.encoded for r in own):.0f}"
        print(f"| {name} | {spread(seconds)} | {counts} | {spread(encoding)} |")
    pairs = zip(rounds[DISTINCT], rounds[ONE], strict=True)
    gain = [distinct.seconds / one.seconds for distinct, one in pairs]
    print(f"\nDistinct pictures take {spread(gain)} times as long as one.\n")


# Text, in this process


def measure_text(models: Sequence[tuple[str, Path]], given: argparse.Namespace) -> None:
    options: dict[str, Any] = {"threads": given.threads, "enable_prefix_caching": False}
    made = {name: LLM(str(path), **options) for name, path in models}
    speeds: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(given.text_rounds + 1):
        rng = Random(turn)
        prompts: list[Any] = [
            {"prompt_token_ids": [rng.randrange(10, 250) for _ in range(rng.randrange(16, 257))]}
            for _ in range(given.requests)
        ]
        sampling = SamplingParams(temperature=0.0, max_tokens=given.output_tokens, ignore_eos=True)
        for name in list(made) if turn % 2 else list(made)[::-1]:
            begun = time.perf_counter()
            made[name].generate(prompts, sampling, use_tqdm=False)
            if turn:  # the first one warms up
                tokens = given.requests * given.output_tokens
                speeds[name].append(tokens / (time.perf_counter() - begun))
    print("| checkpoint | output tokens a second |")
    print("| --- | ---: |")
    for name, found in speeds.items():
        print(f"| {name} | {median(found):.0f} ({min(found):.0f} to {max(found):.0f}) |")
    pairs = zip(speeds[WITH_TOWER], speeds[TEXT_ONLY], strict=True)
    print(f"\nWith the tower {spread([tower / text for tower, text in pairs], 3)} times as fast.")


def spread(values: Sequence[float], digits: int = 2) -> str:
    low, middle, high = (
        f"{each:.{digits}f}" for each in (min(values), median(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--side", type=int, default=448, help="pixels of a picture's side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--text-rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a model of the size of tests")
    given = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        vision, text = save_models(folder, tiny=given.tiny)
        measure_pictures(vision, folder, given)
        measure_text(((WITH_TOWER, vision), (TEXT_ONLY, text)), given)


if __name__ == "__main__":
    main()
