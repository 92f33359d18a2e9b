"""Programmatic dependent launch on a GPU: kernels start before the previous one has ended.

Recorded steps of small kernels, which overlap the most, must give the same bits as kernels that run
one after the other, in every replay. Needs Hopper or newer: `pytest -m gpu -rs`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_engine.attention.triton import TritonBackend
from headrace_engine.autotune.steps import CANDIDATES, FEWER_CANDIDATES, ROUNDING, StepBenchmark
from headrace_engine.core.config import EngineConfig
from headrace_engine.kernels.triton.dependent_launch import StepLaunch
from headrace_engine.kernels.triton.launch import (
    ROW_BOUNDS,
    AttentionLaunches,
    DecodeLaunch,
    silu_candidates,
    small_batch_candidates,
    vector_candidates,
)
from headrace_engine.model_loader.loader import place_model
from headrace_engine.models.placed_model import PlacedModel
from headrace_engine.operators.triton import TritonOps
from headrace_engine.operators.tuned_linear import FewRowsLaunch
from headrace_testing.null_cuda_scenes import LLAMA


def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _is_hopper(), reason="no CUDA device from Hopper on"),
]
REPLAYS = 200
SHAPE = {
    "hidden_size": 1024, "intermediate_size": 6144, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 8192,
}  # fmt: skip


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> PlacedModel:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps({**LLAMA, **SHAPE}))
    return place_model(config(folder))


def config(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        device="cuda",
        dtype="bfloat16",
        attention_backend="triton",
        load_format="dummy",
        enable_autotuner=False,
        max_num_seqs=64,
    )


def use_own_kernels(placed: PlacedModel, merges: bool, split: bool, rows: int) -> None:
    """Uses our kernels instead of cuBLAS' for all products that they can compute.

    `merges` and `split` choose how partial results are joined. A single row is multiplied without
    tensor cores if its products are not split.
    """
    ops, backend = placed.ops, placed.attention
    assert isinstance(ops, TritonOps) and isinstance(backend, TritonBackend)
    backend.dependent_launches = ops.dependent_launches
    tile = backend.decode_launch(2, 128, 64).tile
    backend.use(AttentionLaunches(decodes=((64, DecodeLaunch(tile, 128, merges)),)))
    for shape, tuned in ops.products.shapes.items():
        found = small_batch_candidates(shape.inputs, shape.outputs)
        found = [one for one in found if (one.splits > 1) == split] or found
        gated = silu_candidates(shape.inputs, shape.outputs // 2)
        few: list[FewRowsLaunch | None] = [*found, None]
        if rows == 1 and not split:
            few = [*vector_candidates(shape.inputs, 2), *few]
        tuned.chosen[:] = few[:1] * len(ROW_BOUNDS)
        tuned.silu[:] = [gated[0] if gated and not split else None] * len(ROW_BOUNDS)


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_replays_give_the_same_bits_as_kernels_that_do_not_overlap(
    placed: PlacedModel, rows: int, merges: bool, split: bool
) -> None:
    use_own_kernels(placed, merges, split, rows)
    scene = StepBenchmark(placed, config(Path("any")), rows, 1 << 28)
    for part in (part for cache in scene.caches for part in cache):
        part.normal_()
    with torch.inference_mode():
        plain = expect_replays(scene, tuple(CANDIDATES), fused_norms=False)
        fused = expect_replays(scene, FEWER_CANDIDATES, fused_norms=True)
    assert 0 < (fused - plain).float().norm() < ROUNDING * plain.float().norm()


def expect_replays(
    scene: StepBenchmark, overlaps: tuple[str, ...], fused_norms: bool
) -> torch.Tensor:
    """Replays the recordings, and fails if one result differs from the others."""
    alone = StepLaunch(None, fused_norms)
    expected = [scene.run(alone).clone() for _ in range(2)][1]
    assert torch.isfinite(expected).all() and expected.norm() > 0
    for name in overlaps:
        graph, given = recorded(scene, StepLaunch(CANDIDATES[name], fused_norms))
        for number in range(REPLAYS):
            given.zero_()
            graph.replay()
            assert torch.equal(given, expected), (name, fused_norms, number)
    return expected


def recorded(scene: StepBenchmark, launch: StepLaunch) -> tuple[Any, torch.Tensor]:
    scene.run(launch)
    torch.cuda.synchronize()
    make_graph: Any = torch.cuda.CUDAGraph
    graph = make_graph()
    with torch.cuda.graph(graph):
        given = scene.run(launch)
    return graph, given
