"""Mixtures of experts as Triton's grouped products, through the interpreter: routing and layout,
results compared with separate experts, rows that do not depend on others, 8-bit weights, ranks, and
whole models.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from headrace_engine import attention
from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.checkpoints.config import ClampedSwiGLU, ModelConfig
from headrace_engine.cuda_graphs.cuda_graphs import CaptureSizes, GraphedModel
from headrace_engine.cuda_graphs.static_batch import StaticBatch
from headrace_engine.engine.engine import Engine
from headrace_engine.layers.expert_weights import GROUP_MULTIPLE, MixtureParts, read_experts
from headrace_engine.layers.routing import Routing
from headrace_engine.lora.batch import LayerLoRA
from headrace_engine.model_loader import loader
from headrace_engine.models.decoder.decoder import Decoder
from headrace_engine.models.parallel import Shard, WeightCuts
from headrace_engine.operators.batch_invariant import BatchInvariantLinear
from headrace_engine.operators.triton import TritonOps
from headrace_engine.operators.triton_experts import GroupedMoe, most_tiles
from headrace_testing.engines import engine_config, greedy, make_runner, request, run
from headrace_testing.mixtures import Matrices, Mixture, expert_names
from headrace_testing.recorded_steps import PaddedReference, Replays

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HOPPER = (9, 0)


def grouped(parts: MixtureParts, **options: Any) -> GroupedMoe:
    return GroupedMoe(parts, capability=HOPPER, **options)


CASES = {
    "one row": (Mixture(experts=4, per_token=2, hidden=40, inner=24), 1),
    "all experts": (Mixture(experts=4, per_token=4, hidden=24, inner=20), 37),
    "one of many": (Mixture(experts=64, per_token=1, hidden=40, inner=24), 9),
    "odd": (Mixture(experts=7, per_token=3, hidden=90, inner=70, gelu=True), 33),
    "shared": (Mixture(experts=5, per_token=2, hidden=48, inner=40, shared=56), 20),
    "wide": (Mixture(experts=8, per_token=2, hidden=100, inner=70, renormalise=False), 20),
    "gpt-oss": (Mixture(5, 2, 40, 24, swiglu=ClampedSwiGLU(1.702, 0.7)), 20),
    "groups": (Mixture(experts=12, per_token=3, hidden=40, inner=24, shared=16, groups=4), 70),
    "one group": (Mixture(experts=7, per_token=2, hidden=40, inner=24, groups=1), 20),
    "scaled": (Mixture(6, 1, 40, 24, shared=16, renormalise=False, scaled=True), 20),
    "scaled pairs": (Mixture(6, 3, 40, 24, renormalise=False, scaled=True), 70),
    "many": (Mixture(experts=64, per_token=8, hidden=24, inner=16), 20),
    "chunks": (Mixture(experts=3, per_token=2, hidden=20, inner=12), 100),
    "one expert": (Mixture(experts=6, per_token=1, hidden=20, inner=12, skewed=True), 70),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_equal_those_of_separate_experts(name: str) -> None:
    mixture, tokens = CASES[name]
    x = mixture.rows(tokens, DEVICE)
    found = grouped(mixture.parts(DEVICE))(x)
    torch.testing.assert_close(found, mixture.one_by_one(DEVICE)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_round_where_separate_experts_round(dtype: torch.dtype) -> None:
    mixture = Mixture(experts=6, per_token=2, hidden=48, inner=40, shared=24, dtype=dtype)
    x = mixture.rows(19, DEVICE)
    found, expected = grouped(mixture.parts(DEVICE))(x), mixture.one_by_one(DEVICE)(x)
    bound = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (30, 16), (70, 64)])
@pytest.mark.parametrize("skewed", [False, True])
def test_every_pair_is_in_one_tile_of_its_expert(tokens: int, rows: int, skewed: bool) -> None:
    """With `skewed`, all rows go to the same two experts, and the other six have none."""
    mixture = Mixture(experts=8, per_token=2, hidden=16, inner=8, skewed=skewed)
    x = mixture.rows(tokens, DEVICE)
    routing = grouped(mixture.parts(DEVICE)).route(x, rows)
    weights, chosen = mixture.one_by_one(DEVICE).route(x)
    torch.testing.assert_close(by_pair(routing, rows), chosen.flatten().cpu())
    torch.testing.assert_close(routing.weights, weights)
    used = [count for count in chosen.flatten().bincount().tolist() if count]
    assert int(routing.live) == sum(-(-count // rows) for count in used)
    assert int(routing.live) <= routing.tiles.shape[1] == most_tiles(2 * tokens, 8, rows)
    assert len(used) == 2 if skewed else len(used) > 1


def by_pair(routing: Routing, rows: int) -> torch.Tensor:
    """The expert in whose tiles each pair is; fails unless every pair is in exactly one."""
    found = torch.full((routing.order.numel(),), -1)
    for expert, first, stop in routing.tiles[:, : int(routing.live)].t().tolist():
        pairs = routing.order[first : min(stop, first + rows)].long().cpu()
        assert found[pairs].eq(-1).all() and pairs.sort().values.equal(pairs)
        found[pairs] = expert
    return found


@pytest.mark.parametrize("tokens", [7, 34])
def test_padding_is_computed_by_no_expert(tokens: int) -> None:
    mixture = Mixture(experts=8, per_token=2, hidden=16, inner=8, shared=8)
    moe, x = grouped(mixture.parts(DEVICE)), mixture.rows(tokens, DEVICE)
    slots = torch.arange(tokens, device=DEVICE)
    slots[5:] = -1
    routing = moe.route(x, 16, slots)
    assert by_pair(routing, 16).ge(0).sum() == 5 * 2
    found = moe(x, None, slots)
    torch.testing.assert_close(found[:5], moe(x[:5]))
    assert found[5:].eq(0).all()


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_nan_rows_stay_nan_and_do_not_change_other_rows() -> None:
    mixture = Mixture(experts=4, per_token=3, hidden=16, inner=8)
    moe, x = grouped(mixture.parts(DEVICE)), mixture.rows(5, DEVICE)
    expected = moe(x)
    x[2] = float("nan")
    found = moe(x)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4]
    torch.testing.assert_close(found[others], expected[others])
    assert moe(x[:0]).shape == (0, 16)


def test_equal_probabilities_go_to_the_first_experts() -> None:
    mixture = Mixture(experts=6, per_token=2, hidden=16, inner=8)
    routing = grouped(mixture.parts(DEVICE)).route(torch.zeros(3, 16, device=DEVICE), 16)
    assert by_pair(routing, 16).tolist() == [0, 1] * 3


def test_a_row_has_the_same_bits_in_every_batch_if_deterministic() -> None:
    """In batches with one tile for each expert, and with several."""
    mixture = Mixture(3, 2, hidden=72, inner=40, shared=24)
    parts = mixture.parts(DEVICE, BatchInvariantLinear)
    moe, x = grouped(parts, deterministic=True), mixture.rows(66, DEVICE)
    found = moe(x)
    for first, last in ((0, 1), (3, 40)):
        assert torch.equal(moe(x[first:last]), found[first:last])


@pytest.mark.parametrize(("hidden", "group"), [(128, GROUP_MULTIPLE), (64, 64)])
def test_weights_of_8_bit_floats(hidden: int, group: int) -> None:
    """With a scale for each output, or for groups of inputs.

    Read by bits, because the interpreter otherwise widens wrongly.
    """
    mixture = Mixture(experts=3, per_token=2, hidden=hidden, inner=64)
    matrices = Matrices(mixture, DEVICE, group)
    weights = read_experts(matrices, expert_names(3), float8=True)
    assert weights is not None and weights.down.values.dtype is torch.float8_e4m3fn
    x, exact = mixture.rows(7, DEVICE), read_experts(matrices, expert_names(3), float8=False)
    assert exact is not None and exact.down.values.dtype is torch.float32
    found = GroupedMoe(mixture.parts(DEVICE, weights=weights), capability=(8, 0))(x)
    expected = mixture.one_by_one(DEVICE, weights=exact)(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_scales_of_odd_groups_use_separate_layers() -> None:
    matrices = Matrices(Mixture(experts=2, per_token=1, hidden=128, inner=64), DEVICE, 32)
    assert read_experts(matrices, expert_names(2), float8=True) is None


class Alone:
    """A rank that waits for no other."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]


def test_ranks_add_up_to_the_whole(checkpoint: Any) -> None:
    mixture = Mixture(experts=4, per_token=2, hidden=32, inner=24)
    x, found = mixture.rows(6, DEVICE), torch.zeros(6, 32, device=DEVICE)
    config = ModelConfig.from_hf(load_checkpoint(str(checkpoint("qwen2-moe"))))
    for rank in range(2):
        cuts = WeightCuts(config, Shard(rank, 2, Alone()))
        weights = read_experts(Matrices(mixture, DEVICE, cut=cuts.tensor), expert_names(4), False)
        assert weights is not None and weights.down.values.shape == (4, 32, 12)
        found += grouped(mixture.parts(DEVICE, weights=weights))(x)
    torch.testing.assert_close(found, mixture.one_by_one(DEVICE)(x), rtol=1e-4, atol=1e-5)


PARTS = {
    "one row": [(0, 2), (2, 4)],
    "one of many": [(0, 40), (40, 41), (41, 64)],
    "odd": [(0, 3), (3, 5), (5, 7)],
    "gpt-oss": [(0, 3), (3, 5)],
    "groups": [(0, 6), (6, 12)],
    "scaled": [(0, 3), (3, 6)],
    "scaled pairs": [(0, 1), (1, 6)],
    "chunks": [(0, 1), (1, 2), (2, 3)],
    "one expert": [(0, 3), (3, 6)],
}


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """New tensors are NaN, so that no result is right because memory happened to be 0."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled_memory")
@pytest.mark.parametrize("name", PARTS)
def test_whole_experts_of_several_ranks_add_up(name: str) -> None:
    """A row none of whose experts a rank has is 0 there."""
    mixture, tokens = CASES[name]
    x = mixture.rows(tokens, DEVICE)
    parts = [grouped(mixture.part(DEVICE, *own))(x) for own in PARTS[name]]
    expected = mixture.one_by_one(DEVICE)(x)
    torch.testing.assert_close(torch.stack(parts).sum(0), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("filled_memory")
def test_padding_is_computed_by_no_rank() -> None:
    mixture = Mixture(experts=8, per_token=2, hidden=16, inner=8, shared=8)
    x, slots = mixture.rows(34, DEVICE), torch.arange(34, device=DEVICE)
    slots[5:] = -1
    for own in ((0, 5), (5, 8)):
        moe = grouped(mixture.part(DEVICE, *own))
        found = moe(x, None, slots)
        torch.testing.assert_close(found[:5], moe(x[:5]))
        assert found[5:].eq(0).all()


class NamedAttention(PaddedReference):
    """With the backend `reference` no kernels are used."""

    name: ClassVar[str] = "named"


def test_a_recorded_model_gives_the_tokens_of_transformers(
    checkpoint: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with and without experts, decodes of two sequences padded to four."""
    folder: Path = checkpoint("qwen2-moe")
    paths = reference("qwen2-moe").clear_paths(2, 3)
    monkeypatch.setattr(attention, "select", lambda *_: NamedAttention())
    monkeypatch.setattr(loader, "make_ops", lambda *_: TritonOps())
    routed, route = [], GroupedMoe.route

    def noted(
        moe: GroupedMoe,
        x: torch.Tensor,
        rows: int,
        slots: torch.Tensor | None = None,
        lora: LayerLoRA | None = None,
    ) -> Routing:
        routed.append((len(x), None if slots is None else int((slots < 0).sum())))
        return route(moe, x, rows, slots, lora)

    monkeypatch.setattr(GroupedMoe, "route", noted)
    runner = make_runner(folder, attention_backend="auto", num_blocks=128, device=DEVICE.type)
    assert isinstance(runner.model, Decoder) and runner.model.can_be_recorded
    replays, batch = Replays(), StaticBatch(4, runner.max_model_len // 4, runner.device)
    with torch.inference_mode():
        sizes = CaptureSizes((4,), (512,))
        runner.model = GraphedModel(runner.model, runner._caches, sizes, batch, replays)
    outputs = run(
        Engine(engine_config(folder), runner),
        [request(str(index), path.prompt, greedy(3)) for index, path in enumerate(paths)],
    )
    assert [tuple(outputs[str(i), 0].token_ids) for i in range(2)] == [p.output for p in paths]
    tokens = sum(len(path.prompt) for path in paths)
    recorded, prompts, decodes = [(4, 4)] * 2, [(tokens, 0), (2, None)], [(4, 2)] * 4
    assert routed == recorded + prompts + decodes and replays.used == [4, 4]
