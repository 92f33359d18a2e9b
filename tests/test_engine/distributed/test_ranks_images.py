"""Images on two ranks: tokens and vectors equal transformers', with chunks that end inside images.
Only rank 0 has the tower.

Ranks are threads with real gloo collectives. Left out: GPUs and NCCL, which need more than one
device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_common.sampling.pooling import PoolingParams
from headrace_engine.engine.engine import Engine
from headrace_engine.model_loader.loader import place_model
from headrace_engine.models.placed_model import PlacedModel
from headrace_engine.offline.embeddings import embed
from headrace_testing.engines import run
from headrace_testing.image_prompts import ImagePrompts, ImageRequests, Prompt, noise, text
from headrace_testing.late_interaction import SIZE, Reference, save_late_interaction
from headrace_testing.rank_threads import close, make_engine

CheckpointMaker = Callable[[str], Path]

LENGTH = 6
ASKED: list[Prompt] = [
    tuple(text(1, 9)),
    (noise(16, 24), *text(2, 4), noise(40, 16, 1), 77, noise(16, 24), *text(3, 3)),
    (*text(4, 6), noise(24, 24, 3), *text(5, 9)),
]


@contextmanager
def two_ranks(folder: Path, **options: Any) -> Iterator[Engine]:
    engine, runner = make_engine(folder, 2, **options)
    try:
        yield engine
    finally:
        close(runner)


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        ("qwen2.5-vl", 7),  # rotations with three positions
        ("qwen3-vl", 7),  # several levels of embeddings
        ("gemma3-multimodal", 20),  # tokens that see later ones of their image
        ("mistral3-multimodal", 7),
    ],
)
def test_greedy_tokens_equal_transformers(
    name: str, chunk: int, checkpoint: CheckpointMaker
) -> None:
    folder = checkpoint(name)
    prompts = ImagePrompts(folder)
    asked = [prompts.request(str(at), one, LENGTH) for at, one in enumerate(ASKED)]
    with two_ranks(folder, attention_backend="auto", max_num_batched_tokens=chunk) as engine:
        outputs = run(engine, asked)
    for at, prompt in enumerate(ASKED):
        prompts.check(prompt, outputs[str(at), 0].token_ids)


def test_each_token_has_its_vector(tmp_path: Path) -> None:
    folder, picture = save_late_interaction(tmp_path / "colqwen2"), noise(24, 40)
    prompts: list[Prompt] = [tuple(text(1, 9)), (5, picture, *text(2, 4))]
    given = [ImageRequests(folder).read(prompt) for prompt in prompts]
    with two_ranks(folder, max_num_batched_tokens=7) as engine:
        found = embed(engine, given, PoolingParams(), use_tqdm=False)
    reference = Reference(folder)
    for output, (ids, images) in zip(found, given, strict=True):
        vectors = torch.tensor(output.outputs.embedding).view(-1, SIZE)
        wanted = reference.vectors(ids, picture if images else None)
        torch.testing.assert_close(vectors, wanted, atol=1e-4, rtol=1e-4)


def test_only_the_first_rank_loads_the_tower(
    checkpoint: CheckpointMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    towers = []

    def noted(*given: Any) -> PlacedModel:
        placed = place_model(*given)
        towers.append(placed.tower)
        return placed

    monkeypatch.setattr("headrace_engine.distributed.rank.place_model", noted)
    _, runner = make_engine(checkpoint("qwen2.5-vl"), 2)
    close(runner)
    assert runner.image_limits is not None
    assert towers == [None]
