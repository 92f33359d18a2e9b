"""RMS norms fused into the products before and after them, through Triton's interpreter: compared
with separate norms, and with float64.
"""

from dataclasses import replace

import pytest
import torch

from headrace_engine.kernels.triton import launch as launches
from headrace_engine.kernels.triton.launch import ROW_BOUNDS, SmallBatchLaunch
from headrace_engine.operators.triton import TritonOps
from headrace_engine.operators.tuned_linear import TunedLinear
from headrace_testing.triton_interpreter import nearly_cancel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KIND, EPS, ULP = torch.bfloat16, 1e-5, 2**-8
# The last tile of 96 outputs is half full.
TILE = SmallBatchLaunch(64, 32, 1, 4, 3)
HIDDEN = 96


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates that fit small layers."""
    for tiles in ("SMALL_BATCH_TILES", "SILU_TILES"):
        monkeypatch.setattr(launches, tiles, (TILE,))
    monkeypatch.setattr(launches, "FEWEST_PROGRAMS", 0)


def random(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (numbers * scale).to(DEVICE, KIND)


def layer(ops: TritonOps, outputs: int, inputs: int, splits: int, bias: bool) -> TunedLinear:
    """A layer whose inputs are split into `splits` parts."""
    added = random(outputs, seed=5) if bias else None
    made = ops.linear(random(outputs, inputs, seed=outputs, scale=0.1), added)
    assert isinstance(made, TunedLinear) and made.can_fuse_norms()
    made._tuned.chosen[:] = [replace(TILE, splits=splits)] * len(ROW_BOUNDS)
    return made


@pytest.mark.parametrize(("rows", "splits", "bias"), [(1, 1, False), (17, 2, True), (64, 4, False)])
def test_one_product_adds_and_squares_and_the_next_one_divides(
    rows: int, splits: int, bias: bool
) -> None:
    ops = TritonOps()
    o, qkv = layer(ops, HIDDEN, 128, splits, bias), layer(ops, 70, HIDDEN, 1, bias)
    gate_up = layer(ops, 140, HIDDEN, 1, bias)
    x, norm = random(rows, 128, seed=1), random(HIDDEN, seed=2)
    before = random(rows, HIDDEN, seed=3, scale=4.0)
    before[:, ::2] = 0.0  # so that the sum is the product itself
    nearly_cancel(x, o._weight)
    separate, total = ops.add_rms_norm(o(x), before.clone(), norm, EPS)
    residual = before.clone()
    normed = o.linear_add_norm(x, residual, norm, EPS)
    assert torch.equal(residual, total), "rounded like a separate norm"
    assert torch.equal(normed.rows, (total.float() * norm.float()).to(KIND))
    squares = total.double().square().sum(1)
    torch.testing.assert_close(normed.squares.double().sum(1), squares, rtol=1e-6, atol=0.0)
    exact = total.double() * norm * (squares / HIDDEN + EPS).rsqrt()[:, None]
    for linear in (qkv, gate_up):
        whole = exact @ linear._weight.double().T + (0 if linear._bias is None else linear._bias)
        expect_close(linear.norm_linear(normed), whole)
        expect_close(linear(separate), whole)
    activated = gate_up.norm_linear_silu(normed)
    assert torch.equal(activated, ops.silu_mul(gate_up.norm_linear(normed)))
    again = before.clone()
    assert torch.equal(o.linear_add_norm(x, again, norm, EPS).squares, normed.squares)


def expect_close(found: torch.Tensor, exact: torch.Tensor) -> None:
    error = (found.double() - exact).norm() / exact.norm()
    assert error < ULP, error


def test_products_in_float16_have_no_fused_norms() -> None:
    """An intermediate sum, before the division, may exceed the range of its dtype."""
    made = TritonOps().linear(torch.ones(64, 64, dtype=torch.float16, device=DEVICE), None)
    assert isinstance(made, TunedLinear) and not made.can_fuse_norms()
    narrow = TritonOps().linear(torch.ones(64, 60, dtype=KIND, device=DEVICE), None)
    assert isinstance(narrow, TunedLinear) and not narrow.can_fuse_norms(), "no tile fits"
