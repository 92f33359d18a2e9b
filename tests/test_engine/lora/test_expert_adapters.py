"""Adapters of a mixture's experts: Triton's products, through the interpreter, compared with
experts one by one; and the formats in which PEFT saves them. test_lora and test_ranks_lora test
whole models with such adapters."""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from headrace_engine import attention
from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.checkpoints.config import ModelConfig
from headrace_engine.cuda_graphs.cuda_graphs import CaptureSizes, GraphedModel
from headrace_engine.cuda_graphs.static_batch import StaticBatch
from headrace_engine.device.transfer import Transfer
from headrace_engine.engine.engine import Engine
from headrace_engine.lora.adapter import AdapterFile
from headrace_engine.lora.batch import LayerLoRA, LoRALimits
from headrace_engine.lora.experts import LoRAExperts
from headrace_engine.lora.linear import LoRALinear
from headrace_engine.lora.modules import Factors
from headrace_engine.lora.shapes import LinearName, lora_shapes, mixture_shapes
from headrace_engine.lora.tiles import TiledProducts
from headrace_engine.model_loader import loader
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.operators.triton import TritonOps
from headrace_engine.operators.triton_experts import GroupedMoe
from headrace_testing.adapter_scenes import AdapterScene
from headrace_testing.adapters import save_adapter
from headrace_testing.checkpoints import save_checkpoint
from headrace_testing.engines import engine_config, greedy, request, run
from headrace_testing.mixtures import Mixture
from headrace_testing.recorded_steps import PaddedReference, Replays

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RANK = 5
# Tokens of a whole model.
STEPS = 2
# For each slot, the rank of each module of its adapter.
SLOTS: tuple[dict[str, int], ...] = (
    {"experts_gate_up": 2 * RANK, "experts_down": 3, "router": 2},
    {"experts_down": RANK, "shared_gate_up": 4, "shared_down": 1, "shared_gate": 2},
    {"experts_gate_up": 1},
)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def factors(shape: Any, rank: int, seed: int, dtype: torch.dtype) -> Factors:
    room = (shape.experts,) if shape.experts else ()
    (columns,) = list(shape.parts.values())[-1:]
    down = random(*room, rank, shape.inputs, seed=seed) * shape.inputs**-0.5
    up = random(*room, rank, columns.width, seed=seed + 1) * 0.5
    return Factors(down.to(dtype), up.to(dtype))


def layer_of(mixture: Mixture, slots: list[int]) -> LayerLoRA:
    """A layer in whose slots each adapter replaces an earlier one."""
    linears: dict[LinearName, LoRALinear] = {}
    experts: dict[LinearName, LoRAExperts] = {}
    for name, shape in mixture_shapes(mixture.hidden, mixture.config).items():
        sizes = (shape, len(SLOTS), shape.matrices * RANK)
        made = LoRAExperts if shape.experts else LoRALinear
        layer: Any = made(*sizes, mixture.dtype, DEVICE)
        for turn in (1, 0):
            for slot in range(len(SLOTS)):
                rank = SLOTS[(slot + turn) % len(SLOTS)].get(name, 0)
                own = factors(shape, rank, 7 * slot + turn, mixture.dtype) if rank else None
                part = list(shape.parts)[-1]
                put = own if shape.experts else {part: own} if own is not None else {}
                layer.put(slot, put)
        (experts if shape.experts else linears)[name] = layer
    limits = LoRALimits(len(SLOTS), 64, mixture.dtype.itemsize)
    owners = np.array(slots, dtype=np.int64)
    rows = TiledProducts(limits, Transfer(DEVICE)).rows(owners)
    return LayerLoRA(linears, rows, experts, owners)


MIXTURES = {
    "few": (Mixture(experts=4, per_token=2, hidden=24, inner=16), [0, 2, -1, 1]),
    "odd": (Mixture(experts=3, per_token=3, hidden=70, inner=50, gelu=True), [0] * 17 + [-1, 2]),
    "shared": (Mixture(experts=4, per_token=1, hidden=48, inner=24, shared=40), [1, 0, 1, 2]),
    "bfloat16": (
        Mixture(experts=3, per_token=2, hidden=40, inner=24, dtype=torch.bfloat16),
        [0, 1, 2, -1],
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_numbers_equal_those_of_separate_experts(name: str) -> None:
    mixture, slots = MIXTURES[name]
    lora, x = layer_of(mixture, slots), mixture.rows(len(slots), DEVICE)
    grouped, one_by_one = GroupedMoe(mixture.parts(DEVICE)), mixture.one_by_one(DEVICE)

    found, expected = grouped(x, lora), one_by_one(x, lora)

    bound = 1e-4 if mixture.dtype is torch.float32 else 2**-5
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    changed = (expected - one_by_one(x)).abs().amax(dim=1) > 0.01
    assert changed.tolist() == [slot >= 0 for slot in slots]
    plain = [row for row, slot in enumerate(slots) if slot < 0]
    torch.testing.assert_close(found[plain], grouped(x)[plain], rtol=1e-2, atol=1e-3)


class NamedAttention(PaddedReference):
    """With the backend `reference` no kernels are used."""

    name: ClassVar[str] = "named"


def test_recorded_steps_change_experts(
    tmp_path: Path, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes of two sequences, one of which has an adapter, padded to three."""
    kinds: dict[str, dict[str, Any]] = {"a": {"modules": (), "experts": "joined", "rank": 3}}
    scene = AdapterScene(tmp_path, checkpoint("mixtral"), kinds)
    monkeypatch.setattr(attention, "select", lambda *_: NamedAttention())
    monkeypatch.setattr(loader, "make_ops", lambda *_: TritonOps())
    options: dict[str, Any] = {
        "device": DEVICE.type,
        "attention_backend": "auto",
        "num_blocks": 64,
        "enable_lora": True,
        "lora_modules": {"a": str(scene.folders["a"])},
    }
    config = engine_config(scene.checkpoint, **options)
    runner, replays = ModelRunner(config), Replays()
    assert runner._lora is not None
    batch = StaticBatch(3, runner.max_model_len // 4, runner.device, runner._lora.static)
    with torch.inference_mode():
        sizes = CaptureSizes((3,), (512,))
        runner.model = GraphedModel(runner.model, runner._caches, sizes, batch, replays)
    paths = {name: scene.paths(name, 1)[0] for name in (None, "a")}

    outputs = run(
        Engine(config, runner),
        [
            replace(request(str(name), path.prompt, greedy(STEPS)), lora=name)
            for name, path in paths.items()
        ],
    )

    for name, path in paths.items():
        assert tuple(outputs[str(name), 0].token_ids) == path.output[:STEPS]
    assert replays.used == [3] * (STEPS - 1)


def test_padding_is_left_alone() -> None:
    """Rows without a slot in the cache get no expert, as in recorded steps."""
    mixture, slots = MIXTURES["few"]
    lora, x = layer_of(mixture, slots), mixture.rows(4, DEVICE)
    grouped = GroupedMoe(mixture.parts(DEVICE))
    found = grouped(x, lora, torch.tensor([3, 7, -1, -1], device=DEVICE))
    torch.testing.assert_close(found[:2], grouped(x, lora)[:2])
    assert found[2:].eq(0).all()


@pytest.mark.parametrize(("version", "turned"), [(None, True), ("0.18.1", True), ("0.21.2", False)])
def test_pefts_version_decides_which_of_two_square_matrices_is_a(
    version: str | None, turned: bool, tmp_path: Path
) -> None:
    """Gate and up together have as many outputs as inputs.

    Other matrices are recognised by their shapes.
    """
    checkpoint = save_checkpoint(tmp_path / "model", "qwen3-moe", moe_intermediate_size=32)
    fields: dict[str, Any] = {} if version is None else {"peft_version": version}
    folder = save_adapter(
        tmp_path / "a", checkpoint, modules=(), experts="joined", rank=3, **fields
    )
    shapes = lora_shapes(ModelConfig.from_hf(load_checkpoint(str(checkpoint), None)))
    file = AdapterFile(folder, shapes, 16)

    (own,) = file.load(torch.float32)[1]["experts_gate_up"].values()

    path = "base_model.model.model.layers.1.mlp.experts.base_layer"
    a = file._read(f"{path}.lora_A.weight").view(6, 3, 64)
    assert torch.equal(own.up / own.up.abs().max(), a / a.abs().max()) is turned
    assert torch.equal(own.down, a) is not turned
