"""Measures the grouped products of mixtures of experts, for few tokens and for many: first the
tiles of both products at once, then those of the second one alone. Random rows go to random
experts."""

from functools import partial

import torch

from ..kernels.triton.launch import EXPERT_BOUNDS, ExpertLaunch, LinearLaunch, down_candidates
from ..operators.tuned_experts import Mixtures, MixtureShape, TunableMixture, TunedMixture
from .autotuner import Autotuner, Run
from .layers import ROTATED_BYTES, dtype_name

# The number of tokens whose measurement applies to all numbers above the last bound.
MANY_TOKENS = 4096


def tune_experts(tuner: Autotuner, mixtures: Mixtures, tokens: int, like: torch.Tensor) -> None:
    """Tunes all shapes for `tokens`.

    For one of EXPERT_BOUNDS, the choice also serves smaller numbers, down to the next lower bound;
    otherwise it serves all numbers above the last bound. Rows have the dtype and the device of
    `like`.
    """
    place = EXPERT_BOUNDS.index(tokens) if tokens in EXPERT_BOUNDS else len(EXPERT_BOUNDS)
    for shape, tuned in mixtures.shapes.items():
        x = torch.randn(tokens, shape.hidden, device=like.device).to(like.dtype)
        tuned.choices[place] = _tune(tuner, shape, tuned, x)


def _tune(
    tuner: Autotuner, shape: MixtureShape, tuned: TunedMixture, x: torch.Tensor
) -> ExpertLaunch:
    layers, read = _rotated(tuned, shape.read_bytes(len(x)))
    what = f"experts {_name_of(shape, x.dtype)}, tokens {len(x)}"
    both = layers[0].candidates(x)
    best = _choose(tuner, f"{what}, both", both, layers, x, read)
    return _choose(tuner, f"{what}, down", down_candidates(best, both), layers, x, read)


def _choose(
    tuner: Autotuner,
    what: str,
    launches: list[ExpertLaunch],
    layers: list[TunableMixture],
    x: torch.Tensor,
    read: int,
) -> ExpertLaunch:
    named = {_name(launch): launch for launch in launches}
    runs: dict[str, Run] = {name: partial(_run, layers, x, one) for name, one in named.items()}
    return named[tuner.choose(what, runs, read)]


def _run(layers: list[TunableMixture], x: torch.Tensor, launch: ExpertLaunch) -> torch.Tensor:
    """Computes all layers and returns the first one's result."""
    return [layer.run(x, launch) for layer in layers][0]


def _rotated(tuned: TunedMixture, read: int) -> tuple[list[TunableMixture], int]:
    """Enough layers that none is still cached when its turn comes again, and the bytes they
    read."""
    layers = list(tuned.layers[: max(1, -(-ROTATED_BYTES // max(1, read)))])
    return layers, read * len(layers)


def _name_of(shape: MixtureShape, dtype: torch.dtype) -> str:
    kinds = dict.fromkeys(map(dtype_name, (dtype, shape.stored)))
    sizes = f"{shape.per_token} of {shape.experts}, {shape.inner}x{shape.hidden}"
    group = f" by {shape.group}" if shape.group else ""
    bits = f" of {shape.bits} bits" if shape.bits else ""
    local = f", {shape.experts - shape.elsewhere} here" if shape.elsewhere else ""
    return f"{sizes}{local}, {' and '.join(kinds)}{bits}{group}"


def _name(launch: ExpertLaunch) -> str:
    up, down = (_tile_name(one) for one in (launch.up, launch.down))
    return up if up == down else f"{up}; {down}"


def _tile_name(tile: LinearLaunch) -> str:
    sizes = f"{tile.rows}x{tile.columns}x{tile.depth}"
    return f"{sizes}, warps {tile.warps}, stages {tile.stages}"
