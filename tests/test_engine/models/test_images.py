"""Greedy tokens of prompts with images equal transformers' for each family: with none, one and
several images of many sizes, in chunks, under preemption, with prefix hits, and when another engine
continues. So do those of prompts with videos, for the families that read them. An image that
several requests read is encoded once. Texts need no tower.

Left out: devices other than the CPU, and weights of real checkpoints.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from headrace_engine.core.errors import CheckpointError, ConfigError, RequestError
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_testing.engines import Output, cpu_backends, engine_config, make_runner, run
from headrace_testing.image_prompts import ImagePrompts, Prompt, noise, text, video
from headrace_testing.rank_threads import RankThread

CheckpointMaker = Callable[[str], Path]
PromptsMaker = Callable[[str], ImagePrompts]

NAMES = (
    "qwen2-vl",
    "qwen2.5-vl",
    "qwen3-vl",
    "qwen3_5-multimodal",
    "gemma3-multimodal",
    "gemma4-multimodal",
    "gemma4-small",
    "mistral3-multimodal",
    "glm4v",
    "glm46v",
    "glm4v-moe",
    "llama4-multimodal",
    "llava-onevision",
    "smolvlm",
    "idefics3",
)
WITH_VIDEOS = (
    "qwen3-vl",
    "qwen3_5-multimodal",
    "qwen3_5-moe-multimodal",
    "glm4v",
    "glm46v",
    "glm4v-moe",
    "gemma4-videos",
    "llava-onevision",
    "smolvlm",
    "qwen2-vl",
    "qwen2.5-vl",
)
LENGTH = 8
# Tokens of a prefix that are reused with the same image, and with another one: those of full blocks
# of 4, or those up to a state that was kept.
REUSED = dict.fromkeys(NAMES, (32, 4))
REUSED |= {"qwen3_5-multimodal": (24, 0), "gemma3-multimodal": (20, 4)}
REUSED |= {"gemma4-multimodal": (68, 4), "gemma4-small": (68, 4)}
REUSED |= {"llava-onevision": (56, 4), "mistral3-multimodal": (40, 4)}
REUSED |= {"smolvlm": (64, 4), "idefics3": (64, 4)}
# Blocks that are too few for the sequences that begin together.
BLOCKS = dict.fromkeys(NAMES, 38) | {"llama4-multimodal": 32}
BLOCKS |= {"gemma4-multimodal": 40, "gemma4-small": 40}
# Tokens of an image of the families that compute it in one step.
WHOLE = {"gemma3-multimodal": 18, "gemma4-multimodal": 72, "gemma4-videos": 72}
# Options of engines where the usual step has no room for an image.
ROOM = {"gemma4-multimodal": {"max_num_batched_tokens": 96}}
# Width and height in pixels: a token is 8 x 8, and larger images than 64 x 64 are made smaller.
SIZES = ((8, 8), (24, 16), (16, 40), (9, 61), (64, 64), (3, 11), (100, 150), (160, 8))

# The backend, and tokens of a step.
in_chunks_and_whole = pytest.mark.parametrize(
    ("attention", "chunk"),
    [pair for pair in (("reference", 7), ("cpu", 512), ("cpu", 7)) if pair[0] in cpu_backends()],
)


@pytest.fixture(scope="module", params=cpu_backends())
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def prompts(checkpoint: CheckpointMaker) -> PromptsMaker:
    return cache(lambda name: ImagePrompts(checkpoint(name)))


def scenes(name: str = "") -> list[Prompt]:
    """Prompts without an image, with one of each size, and with several."""
    one: list[Prompt] = [
        (*text(seed, 3 + seed), noise(*size, seed), *text(90 + seed, 5))
        for seed, size in enumerate(SIZES)
        if not (name == "mistral3-multimodal" and size == (8, 8))  # a single token is refused
    ]
    several: list[Prompt] = [
        (noise(16, 24), *text(20, 4), noise(40, 16, 1), 77, noise(16, 24), *text(21, 3)),
        (*text(22, 6), noise(24, 24, 3), *text(23, 2), noise(24, 24, 4), *text(24, 9)),
    ]
    return [tuple(text(30, 21)), *one, *several]


def serve(folder: Path, **options: Any) -> Engine:
    return Engine(engine_config(folder, **options), make_runner(folder, **options))


def answer(engine: Engine, prompts: ImagePrompts, asked: list[Prompt]) -> list[Output]:
    """Runs all prompts at once, and compares every token with transformers."""
    outputs = run(engine, [prompts.request(str(at), one, LENGTH) for at, one in enumerate(asked)])
    for at, prompt in enumerate(asked):
        prompts.check(prompt, outputs[str(at), 0].token_ids)
    return [outputs[str(at), 0] for at in range(len(asked))]


@in_chunks_and_whole
@pytest.mark.proves("images")
@pytest.mark.parametrize("name", (*NAMES, "qwen3_5-moe-multimodal"))
def test_greedy_tokens_equal_transformers(
    name: str, attention: str, chunk: int, checkpoint: CheckpointMaker, prompts: PromptsMaker
) -> None:
    chunk = max(chunk, WHOLE.get(name, 0))
    engine = serve(checkpoint(name), attention_backend=attention, max_num_batched_tokens=chunk)
    answer(engine, prompts(name), scenes(name))


def videos(name: str) -> list[Prompt]:
    """Prompts with videos of a few frames, with odd counts, small and large ones, and with an image
    beside them where transformers tells them apart. LLaVA-OneVision's videos in one prompt have
    equal numbers of frames there."""
    second = 2 if name == "llava-onevision" else 3
    found: list[Prompt] = [
        (*text(31, 5), video(4, 16, 24, fps=2), *text(32, 4)),
        (*text(33, 3), video(5, 40, 24, 20), *text(34, 4)),
        (*text(35, 4), video(2, 8, 8, 30, fps=8), 77, video(second, 90, 60, 40), *text(36, 6)),
    ]
    if name.startswith("qwen2"):  # the time is longer than the sides
        found.append((*text(39, 3), video(12, 24, 16, 60, fps=3.7), *text(40, 5)))
    if not name.startswith("glm"):
        found.append((noise(24, 16), *text(37, 4), video(2, 24, 32, 50), *text(38, 3)))
    return found


@in_chunks_and_whole
@pytest.mark.parametrize("name", WITH_VIDEOS)
def test_greedy_tokens_after_videos_equal_transformers(
    name: str, attention: str, chunk: int, checkpoint: CheckpointMaker, prompts: PromptsMaker
) -> None:
    chunk = max(chunk, WHOLE.get(name, 0))
    engine = serve(checkpoint(name), attention_backend=attention, max_num_batched_tokens=chunk)
    answer(engine, prompts(name), videos(name))


def test_frames_that_begin_alike_are_encoded_once(
    checkpoint: CheckpointMaker, prompts: PromptsMaker
) -> None:
    """But not where the whole video makes their size another one."""
    engine, made = serve(checkpoint("qwen3-vl"), enable_prefix_caching=False), prompts("qwen3-vl")
    asked: list[Prompt] = [
        (*text(39 + at, 4), video(frames, 32, 32), *text(42, 4))
        for at, frames in enumerate((4, 4, 8))
    ]
    answer(engine, made, asked)
    assert made.read(asked[0])[1][0].span.grid != made.read(asked[2])[1][0].span.grid
    assert engine.stats().images_encoded == 2 + 4


@pytest.mark.parametrize("name", NAMES)
def test_an_image_that_is_preempted_is_not_encoded_again(
    name: str, backend: str, checkpoint: CheckpointMaker, prompts: PromptsMaker
) -> None:
    engine = serve(
        checkpoint(name),
        attention_backend=backend,
        num_blocks=BLOCKS[name],
        watermark=0.0,
        enable_prefix_caching=False,
        disable_hybrid_kv_cache_manager=True,
        **ROOM.get(name, {}),
    )
    asked: list[Prompt] = [
        (*text(40 + at, 6), noise(32, 24, at), *text(50 + at, 4)) for at in range(8)
    ]
    answer(engine, prompts(name), asked)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.images_encoded == 8
    assert stats.encoder_cache_queries > 8


def test_an_image_of_several_requests_is_encoded_once(
    backend: str, checkpoint: CheckpointMaker, prompts: PromptsMaker
) -> None:
    engine = serve(checkpoint("qwen3-vl"), attention_backend=backend, enable_prefix_caching=False)
    asked: list[Prompt] = [(*text(60 + at, 5), noise(48, 40), *text(70 + at, 4)) for at in range(6)]
    answer(engine, prompts("qwen3-vl"), asked)
    stats = engine.stats()
    assert stats.images_encoded == 1
    assert stats.encoder_cache_hits == 5
    (image,) = prompts("qwen3-vl").read(asked[0])[1]
    assert stats.image_tokens_encoded == image.span.length
    assert stats.encode_seconds > 0


@pytest.mark.parametrize("name", NAMES)
def test_prefixes_with_the_same_image_are_reused(
    name: str, checkpoint: CheckpointMaker, prompts: PromptsMaker
) -> None:
    engine = serve(checkpoint(name), **ROOM.get(name, {}))
    asked: list[Prompt] = [(*text(80, 5), noise(48, 40), *text(81 + at, 4)) for at in range(2)]
    (first,) = answer(engine, prompts(name), asked[:1])
    (second,) = answer(engine, prompts(name), asked[1:])
    assert first.cached_tokens == 0
    assert second.cached_tokens == REUSED[name][0], "those up to the image's end"
    assert engine.stats().images_encoded == 1


@pytest.mark.parametrize("name", NAMES)
def test_prefixes_with_another_image_of_the_same_size_are_not_reused(
    name: str, checkpoint: CheckpointMaker, prompts: PromptsMaker
) -> None:
    engine = serve(checkpoint(name), **ROOM.get(name, {}))
    asked: list[Prompt] = [(*text(80, 5), noise(48, 40, at), *text(81, 4)) for at in range(2)]
    answer(engine, prompts(name), asked[:1])
    (second,) = answer(engine, prompts(name), asked[1:])
    assert second.cached_tokens == REUSED[name][1], "those before the image"


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_read_without_the_tower(
    name: str, checkpoint: CheckpointMaker, prompts: PromptsMaker
) -> None:
    options = {"attention_backend": cpu_backends()[-1], "limit_mm_per_prompt": {"image": 0}}
    runner = make_runner(checkpoint(name), **options)
    engine = Engine(engine_config(checkpoint(name), **options), runner)
    answer(engine, prompts(name), scenes(name)[:1])
    assert runner.image_limits is None


@pytest.mark.parametrize("name", NAMES)
def test_another_engine_continues_after_the_tokens_of_the_first(
    name: str, checkpoint: CheckpointMaker, prompts: PromptsMaker
) -> None:
    """The second engine has the images and the first tokens, but no KV, as after a kill."""
    options = {"attention_backend": cpu_backends()[-1], **ROOM.get(name, {})}
    asked = scenes(name)[-2:]
    requests = [prompts(name).request(str(at), prompt, LENGTH) for at, prompt in enumerate(asked)]
    known: dict[str, list[int]] = {one.request_id: [] for one in requests}
    dying = serve(checkpoint(name), **options)
    for one in requests:
        dying.add_request(one)
    while not all(map(len, known.values())):
        for output in dying.step():
            known[output.request_id] += output.token_ids
    assert all(len(tokens) < LENGTH for tokens in known.values())
    other = serve(checkpoint(name), **options)
    resumed = [replace(one, resume=(tuple(known[one.request_id]),)) for one in requests]
    outputs = run(other, resumed)
    for prompt, one in zip(asked, requests, strict=True):
        more = outputs[one.request_id, 0].token_ids
        prompts(name).check(prompt, known[one.request_id] + more)
        assert len(known[one.request_id]) + len(more) == LENGTH
    assert other.stats().images_encoded == 4, "each picture once"


@pytest.mark.parametrize("options", [{"max_num_encoder_input_tokens": 1}, {}])
def test_images_wait_for_room_among_encoded_ones(
    options: dict[str, int], checkpoint: CheckpointMaker, prompts: PromptsMaker
) -> None:
    """There is room for the largest image only."""
    room = 64 * 3 * 64 * 4
    engine = serve(checkpoint("qwen3-vl"), encoder_cache_bytes=room, **options)
    answer(engine, prompts("qwen3-vl"), scenes())


def test_the_next_step_is_scheduled_while_images_are_encoded(
    checkpoint: CheckpointMaker, prompts: PromptsMaker
) -> None:
    engine = serve(checkpoint("qwen2.5-vl"), async_scheduling=True, max_num_batched_tokens=16)
    answer(engine, prompts("qwen2.5-vl"), scenes())


def test_several_choices_share_an_image(checkpoint: CheckpointMaker, prompts: PromptsMaker) -> None:
    engine, prompt = serve(checkpoint("qwen2.5-vl")), scenes()[-1]
    outputs = run(engine, [prompts("qwen2.5-vl").request("r", prompt, LENGTH, n=3)])
    for choice in range(3):
        prompts("qwen2.5-vl").check(prompt, outputs["r", choice].token_ids)


@pytest.mark.parametrize(
    ("options", "prompt", "message"),
    [
        ({"limit_mm_per_prompt": {"image": 0}}, (5, noise(8, 8), 6), "reads no images"),
        ({"limit_mm_per_prompt": {"image": 1}}, (noise(8, 8), noise(8, 8), 6), "has 2 images"),
        ({}, (5, noise(8, 8)), "ends with an image"),
        ({"encoder_cache_bytes": 2048}, (5, noise(64, 64), 6), "has 64 tokens, but .* room for 8"),
    ],
)
def test_images_that_the_engine_cannot_read_are_refused(
    options: dict[str, Any],
    prompt: Prompt,
    message: str,
    checkpoint: CheckpointMaker,
    prompts: PromptsMaker,
) -> None:
    engine = serve(checkpoint("qwen2.5-vl"), **options)
    with pytest.raises(RequestError, match=message):
        engine.add_request(prompts("qwen2.5-vl").request("r", prompt, LENGTH))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deterministic": True}, "deterministic"),
        ({"load_format": "dummy"}, "load_format dummy"),
    ],
)
def test_images_that_are_asked_for_need_a_tower(
    options: dict[str, Any], message: str, checkpoint: CheckpointMaker
) -> None:
    config = engine_config(checkpoint("qwen2.5-vl"), limit_mm_per_prompt={"image": 1}, **options)
    with pytest.raises(ConfigError, match=message):
        ModelRunner(config, launch=RankThread)


def test_another_model_has_no_tower(checkpoint: CheckpointMaker) -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no vision tower"):
        make_runner(checkpoint("llama"), limit_mm_per_prompt={"image": 1})


def test_a_missing_tensor_of_the_tower_is_named(
    checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    folder = copytree(checkpoint("qwen2.5-vl"), tmp_path / "broken")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("visual.merger.ln_q.weight"))
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name} is missing"):
        make_runner(folder)
    make_runner(folder, limit_mm_per_prompt={"image": 0})
