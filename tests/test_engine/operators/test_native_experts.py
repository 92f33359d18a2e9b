"""The experts of a mixture in one native call, for every instruction set that this CPU runs:
results compared with experts computed one by one, and rows that do not depend on others."""

from dataclasses import replace

import pytest
import torch

from headrace_engine.checkpoints.config import ClampedSwiGLU
from headrace_engine.kernels.cpu import library
from headrace_engine.layers.expert_weights import GroupedWeight
from headrace_engine.layers.feed_forward import GatedActivation, GatedMLP, SparseMoe
from headrace_engine.layers.layers import Linear
from headrace_engine.layers.packed_weights import GroupedPackedWeight
from headrace_engine.models.linear.native_linear import NativeExperts, NativeLinear
from headrace_engine.operators.base import squared_relu
from headrace_engine.operators.cpu import NativeOps
from headrace_testing.cpu_levels import chosen_sets
from headrace_testing.mixtures import Mixture

CPU = torch.device("cpu")
# Inner sizes are not multiples of a panel.
CASES = {
    "one row": (Mixture(experts=4, per_token=2, hidden=48, inner=16), 1),
    "all experts": (Mixture(experts=4, per_token=4, hidden=48, inner=80), 37),
    "one of many": (Mixture(experts=64, per_token=1, hidden=32, inner=48), 9),
    "gelu": (Mixture(experts=7, per_token=3, hidden=96, inner=80, gelu=True), 33),
    "shared": (Mixture(experts=5, per_token=2, hidden=48, inner=144, shared=64), 20),
    "gpt-oss": (Mixture(5, 2, 48, 80, swiglu=ClampedSwiGLU(1.702, 0.7)), 20),
    "groups": (Mixture(experts=12, per_token=3, hidden=48, inner=32, shared=16, groups=4), 70),
    "scaled": (Mixture(6, 3, 48, 80, renormalise=False, scaled=True), 70),
    "one expert": (Mixture(experts=6, per_token=1, hidden=32, inner=16, skewed=True), 200),
}
UNGATED = Mixture(experts=5, per_token=2, hidden=48, inner=80)


# `make test-cpus` runs those between the best and the oldest.
@pytest.fixture(params=dict.fromkeys((chosen_sets()[0], chosen_sets()[-1])))
def ops(request: pytest.FixtureRequest) -> NativeOps:
    torch.set_num_threads(2)
    return NativeOps(library.load(request.param))


def packed(
    ops: NativeOps, of: GroupedWeight | GroupedPackedWeight, index: int, *, quantize: bool = False
) -> NativeLinear:
    assert isinstance(of, GroupedWeight)
    biases = [] if of.bias is None else [of.bias[index]]
    layer = ops.executor.pack([of.values[index]], biases, quantize)
    return NativeLinear(ops.executor, layer)


def experts(
    mixture: Mixture, ops: NativeOps, activation: GatedActivation, *, quantize: bool = False
) -> list[GatedMLP]:
    weights = mixture.weights(CPU)
    return [
        GatedMLP(
            packed(ops, weights.gate_up, index, quantize=quantize),
            packed(ops, weights.down, index, quantize=quantize),
            activation,
        )
        for index in range(mixture.experts)
    ]


def joined(mixture: Mixture, ops: NativeOps, *, quantize: bool = False) -> SparseMoe:
    """The mixture with experts that one call computes."""
    plain = mixture.one_by_one(CPU)
    silu = mixture.swiglu is None and not mixture.gelu
    activation = ops.silu_mul if silu else plain.experts[0].activation
    return joins(replace(plain, experts=experts(mixture, ops, activation, quantize=quantize)))


def joins(mixture: SparseMoe) -> SparseMoe:
    first = mixture.experts[0].gate_up
    assert isinstance(first, NativeLinear)
    assert isinstance(first.join(mixture.experts, mixture.config), NativeExperts)
    return mixture


def apart(mixture: SparseMoe) -> SparseMoe:
    """The same layers, computed one by one."""

    def alone(linear: Linear) -> Linear:
        return lambda x: linear(x)

    mlps = [
        GatedMLP(alone(one.gate_up), alone(one.down), one.activation) for one in mixture.experts
    ]
    return replace(mixture, experts=mlps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_results_equal_those_of_separate_experts(
    ops: NativeOps, name: str, dtype: torch.dtype
) -> None:
    mixture, tokens = replace(CASES[name][0], dtype=dtype), CASES[name][1]
    x = mixture.rows(tokens, CPU)
    found, expected = joined(mixture, ops)(x), mixture.one_by_one(CPU)(x)
    assert found.dtype is dtype
    rtol, atol = (1e-4, 1e-5) if dtype is torch.float32 else (4 * torch.finfo(dtype).eps,) * 2
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_experts_of_several_ranks_add_up(ops: NativeOps, name: str) -> None:
    """The first expert alone, the next one alone, and the others. The shared expert is with the
    first one."""
    mixture, tokens = CASES[name]
    x, whole = mixture.rows(tokens, CPU), joined(mixture, ops)
    found = torch.zeros_like(x)
    for own in ((0, 1), (1, 2), (2, mixture.experts)):
        config = replace(whole.config, local_range=own)
        shared = None if own[0] else whole.shared
        part = replace(whole, experts=whole.experts[slice(*own)], shared=shared, config=config)
        found += joins(part)(x)
    torch.testing.assert_close(found, whole(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["all experts", "gpt-oss", "scaled"])
def test_weights_in_8_bits_round_as_in_separate_experts(
    ops: NativeOps, name: str, dtype: torch.dtype
) -> None:
    mixture, tokens = replace(CASES[name][0], dtype=dtype), CASES[name][1]
    found = joined(mixture, ops, quantize=True)
    x = mixture.rows(tokens, CPU)
    wanted = apart(found)(x).float()
    # An activation next to the border between two integers may round to either.
    assert (found(x).float() - wanted).norm() <= 2e-2 * wanted.norm()


def test_experts_without_gates(ops: NativeOps) -> None:
    weights = UNGATED.weights(CPU)
    assert isinstance(weights.gate_up, GroupedWeight)
    mlps = [
        GatedMLP(
            packed(ops, GroupedWeight(weights.gate_up.values[:, : UNGATED.inner]), index),
            packed(ops, weights.down, index),
            squared_relu,
        )
        for index in range(UNGATED.experts)
    ]
    mixture = joins(replace(UNGATED.one_by_one(CPU), experts=mlps))
    x = UNGATED.rows(30, CPU)
    torch.testing.assert_close(mixture(x), apart(mixture)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["all experts", "groups", "scaled"])
def test_a_row_has_the_same_bits_in_every_batch(
    ops: NativeOps, name: str, dtype: torch.dtype
) -> None:
    mixture, tokens = replace(CASES[name][0], dtype=dtype), CASES[name][1]
    moe, x = joined(mixture, ops), mixture.rows(tokens, CPU)
    weights, chosen = moe.route(x)
    whole = moe.mix(x, weights, chosen)
    for rows in (slice(0, 1), slice(5, 9), slice(11, 36)):
        assert moe.mix(x[rows], weights[rows], chosen[rows]).equal(whole[rows])


def test_nan_rows_stay_nan_and_do_not_change_other_rows(ops: NativeOps) -> None:
    mixture, _ = CASES["all experts"]
    moe, x = joined(mixture, ops), mixture.rows(5, CPU)
    expected = moe(x)
    x[2] = float("nan")
    found = moe(x)
    assert found[2].isnan().all()
    kept = [0, 1, 3, 4]
    assert found[kept].equal(expected[kept])


def test_no_rows(ops: NativeOps) -> None:
    mixture, _ = CASES["all experts"]
    assert joined(mixture, ops)(mixture.rows(0, CPU)).shape == (0, mixture.hidden)


def test_experts_of_several_kinds_are_computed_one_by_one(ops: NativeOps) -> None:
    mixture, tokens = CASES["all experts"]
    mlps = experts(mixture, ops, ops.silu_mul)
    quantised = experts(mixture, ops, ops.silu_mul, quantize=True)
    first = mlps[0].gate_up
    assert isinstance(first, NativeLinear)
    others = [
        [*mlps[:3], replace(mlps[3], activation=lambda x: ops.silu_mul(x))],
        [*mlps[:3], replace(mlps[3], down=quantised[3].down)],
    ]
    for mixed in others:
        assert first.join(mixed, mixture.config) is None
    moe, x = replace(mixture.one_by_one(CPU), experts=others[0]), mixture.rows(tokens, CPU)
    torch.testing.assert_close(moe(x), mixture.one_by_one(CPU)(x), rtol=1e-4, atol=1e-5)
