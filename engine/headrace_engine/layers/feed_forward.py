"""The feed-forward part of a decoder layer: a gated MLP, or a mixture of such MLPs.

Tokens are sorted by expert, and each chosen expert computes all its tokens at once. Nothing here
loops over tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch.nn import functional as F

from ..checkpoints.config import ClampedSwiGLU, ExpertsConfig
from ..lora.batch import BlockLoRA, LayerLoRA
from ..lora.expert_rows import ExpertRows
from .layers import Linear

# Maps [T, 2 I], the gate first, to [T, I].
GatedActivation = Callable[[torch.Tensor], torch.Tensor]


def clamped_swiglu(of: ClampedSwiGLU, gate_up: torch.Tensor) -> torch.Tensor:
    """gpt-oss's activation of gate_up [T, 2 I], the gate first: [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=of.limit), up.clamp(-of.limit, of.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * of.alpha))


class FeedForward(Protocol):
    """Maps x [T, H] to [T, H]. `lora` has the adapters of rows; None: no row has one.

    Rows whose entry in `slots` int64 [T] is below 0 are padding; their results are undefined.
    """

    @property
    def can_be_recorded(self) -> bool:
        """Whether it never waits for the device while it computes."""

    def __call__(
        self, x: torch.Tensor, lora: LayerLoRA | None = None, slots: torch.Tensor | None = None
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """An MLP: down(activation of gate_up(x)), with adapters added to each product."""

    gate_up: Linear
    down: Linear
    activation: GatedActivation
    # One launch for both, if no adapter has to change the product in between.
    activated: GatedActivation | None = None

    @property
    def can_be_recorded(self) -> bool:
        return True

    def __call__(
        self, x: torch.Tensor, lora: BlockLoRA | None = None, slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        inner = self._inner(x, lora)
        output = self.down(inner)
        if lora is not None:
            lora.add("down", inner, output)
        return output

    def _inner(self, x: torch.Tensor, lora: BlockLoRA | None) -> torch.Tensor:
        if lora is None and self.activated is not None:
            return self.activated(x)
        gate_up = self.gate_up(x)
        if lora is not None:
            lora.add("gate_up", x, gate_up)
        return self.activation(gate_up)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP that computes every token, scaled by the sigmoid of `gate` [H -> 1], if it has one."""

    mlp: GatedMLP
    gate: Linear | None

    def __call__(self, x: torch.Tensor, lora: LayerLoRA | None = None) -> torch.Tensor:
        opening = self.opening(x, lora)
        inner = self.inner(x, lora)
        return inner if opening is None else torch.sigmoid(opening) * inner

    def inner(self, x: torch.Tensor, lora: LayerLoRA | None) -> torch.Tensor:
        return self.mlp(x, None if lora is None else lora.shared)

    def opening(self, x: torch.Tensor, lora: LayerLoRA | None) -> torch.Tensor | None:
        if self.gate is None:
            return None
        gate = self.gate(x)
        if lora is not None:
            lora.add("shared_gate", x, gate)
        return gate


class JoinedExperts(Protocol):
    """The experts of a mixture, computed together."""

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """What SparseMoe.mix returns without adapters."""


@runtime_checkable
class JoinableLinear(Protocol):
    """A layer that can be computed together with those of the other experts."""

    def join(self, experts: Sequence[GatedMLP], config: ExpertsConfig) -> JoinedExperts | None:
        """The experts, of which the first begins with this layer; None if they have to be computed
        one by one."""


def choose_experts(
    config: ExpertsConfig, logits: torch.Tensor, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32 [T, K], experts int64 [T, K]) for a router's logits [T, E].

    `correction` float32 [E] is added to the scores that choose, not to the weights (DeepSeek-V3,
    https://arxiv.org/abs/2412.19437, section 2.1.2).
    """
    wide = logits.float()
    scores = torch.sigmoid(wide) if config.sigmoid else F.softmax(wide, dim=-1)
    if correction is None and config.groups == 1:
        weights, chosen = scores.topk(config.per_token, dim=-1)
    else:
        ranked = scores if correction is None else scores + correction
        if config.groups > 1:
            ranked = _of_best_groups(config, ranked)
        chosen = ranked.topk(config.per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
    if config.renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return (weights if config.factor == 1.0 else weights * config.factor), chosen


def _of_best_groups(config: ExpertsConfig, ranked: torch.Tensor) -> torch.Tensor:
    """The scores [T, E] with -inf outside the best groups of adjacent experts."""
    grouped = ranked.view(len(ranked), config.groups, config.count // config.groups)
    totals = grouped.topk(config.group_best, dim=-1).values.sum(-1)
    kept = totals.topk(config.kept_groups, dim=-1).indices
    dropped = torch.ones_like(totals, dtype=torch.bool).scatter_(-1, kept, False)
    return grouped.masked_fill(dropped[..., None], -torch.inf).flatten(1)


@dataclass(frozen=True, slots=True)
class SparseMoe:
    """Sends each token through the experts that the router chooses.

    Experts are computed together if their layers support it and no adapter changes them; else one
    by one, which waits for the device to learn how many rows each expert has. Experts after the
    last one return their rows, or nothing without `returns_rows`: one of several ranks adds them.
    `experts` are those of this process; what others compute is not in the sum.
    """

    router: Linear
    experts: Sequence[GatedMLP]
    shared: SharedExpert | None
    config: ExpertsConfig
    correction: torch.Tensor | None = None
    returns_rows: bool = True
    _joined: JoinedExperts | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        first = self.experts[0].gate_up
        if isinstance(first, JoinableLinear) and not self.config.zero:
            object.__setattr__(self, "_joined", first.join(self.experts, self.config))

    @property
    def can_be_recorded(self) -> bool:
        return False

    def __call__(
        self, x: torch.Tensor, lora: LayerLoRA | None = None, slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        mixed = self.mix(x, *self.route(x, lora), lora)
        return mixed if self.shared is None else mixed + self.shared(x, lora)

    def mix(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        lora: LayerLoRA | None = None,
    ) -> torch.Tensor:
        """The weighted sum of the chosen experts' results for x, or the sum of their results for
        weighted x, without the shared expert."""
        chosen = self._numbered(chosen)
        if self._joined is not None and (lora is None or not lora.experts):
            return self._joined(x, weights, chosen)
        order = chosen.flatten().argsort(stable=True)
        tokens = order // self.config.per_token
        rows = x.index_select(0, tokens)
        if self.config.scaled_inputs:
            rows = rows * weights.flatten()[order, None].to(x.dtype)
            weights = torch.ones_like(weights)
        computed = self._compute(rows, chosen, ExpertRows.of(lora, tokens))
        placed = torch.empty_like(computed).index_copy_(0, order, computed)
        placed = placed.view(*chosen.shape, x.shape[1]).float()
        return torch.einsum("tk,tkh->th", weights, placed).to(x.dtype)

    def _numbered(self, chosen: torch.Tensor) -> torch.Tensor:
        """Numbers `experts` from 0. Experts that return rows follow; those of other processes are
        `config.choices`."""
        config, local = self.config, self.config.local
        if config.local_range is None:
            return chosen
        here = (chosen >= local.start) & (chosen < local.stop)
        elsewhere = torch.where(chosen < config.count, config.choices, len(local))
        return torch.where(here, chosen - local.start, elsewhere)

    def route(
        self, x: torch.Tensor, lora: LayerLoRA | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights float32 [T, K], experts int64 [T, K]) of each token."""
        logits = self.router(x)
        if lora is not None:
            lora.add("router", x, logits)
        return choose_experts(self.config, logits, self.correction)

    def _compute(
        self, rows: torch.Tensor, chosen: torch.Tensor, lora: ExpertRows | None
    ) -> torch.Tensor:
        """Computes rows [T * K, H], sorted by expert, each with its expert."""
        choices = self.config.choices
        counts = torch.bincount(chosen.flatten(), minlength=choices + 1).tolist()
        output, start = torch.empty_like(rows), 0
        for index, (expert, count) in enumerate(zip(self.experts, counts, strict=False)):
            if count:
                stop = start + count
                adapted = None if lora is None else lora.part(index, start, stop)
                output[start:stop] = expert(rows[start:stop], adapted)
                start = stop
        stop = len(rows) - counts[choices]
        output[start:stop] = rows[start:stop] if self.returns_rows else 0
        output[stop:] = 0
        return output
