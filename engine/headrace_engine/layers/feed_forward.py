"""The feed-forward part of a decoder layer: a gated MLP, or a mixture of such MLPs.

Tokens are sorted by expert, and each chosen expert computes all its tokens at once. Nothing here
loops over tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

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
    """An MLP that computes every token, scaled by the sigmoid of `gate` [H -> 1]."""

    mlp: GatedMLP
    gate: Linear

    def __call__(self, x: torch.Tensor, lora: LayerLoRA | None = None) -> torch.Tensor:
        return torch.sigmoid(self.opening(x, lora)) * self.inner(x, lora)

    def inner(self, x: torch.Tensor, lora: LayerLoRA | None) -> torch.Tensor:
        return self.mlp(x, None if lora is None else lora.shared)

    def opening(self, x: torch.Tensor, lora: LayerLoRA | None) -> torch.Tensor:
        gate = self.gate(x)
        if lora is not None:
            lora.add("shared_gate", x, gate)
        return gate


@dataclass(frozen=True, slots=True)
class SparseMoe:
    """Sends each token through the experts to which the router gives the highest probabilities.

    Waits for the device to learn how many rows each expert has.
    """

    router: Linear
    experts: Sequence[GatedMLP]
    shared: SharedExpert | None
    config: ExpertsConfig

    @property
    def can_be_recorded(self) -> bool:
        return False

    def __call__(
        self, x: torch.Tensor, lora: LayerLoRA | None = None, slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        weights, chosen = self.route(x, lora)
        order = chosen.flatten().argsort(stable=True)
        tokens = order // self.config.per_token
        computed = self._compute(x.index_select(0, tokens), chosen, ExpertRows.of(lora, tokens))
        placed = torch.empty_like(computed).index_copy_(0, order, computed)
        placed = placed.view(*chosen.shape, x.shape[1]).float()
        mixed = torch.einsum("tk,tkh->th", weights, placed).to(x.dtype)
        return mixed if self.shared is None else mixed + self.shared(x, lora)

    def route(
        self, x: torch.Tensor, lora: LayerLoRA | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights float32 [T, K], experts int64 [T, K]) of each token."""
        logits = self.router(x)
        if lora is not None:
            lora.add("router", x, logits)
        probabilities = F.softmax(logits, dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.config.per_token, dim=-1)
        if self.config.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, chosen

    def _compute(
        self, rows: torch.Tensor, chosen: torch.Tensor, lora: ExpertRows | None
    ) -> torch.Tensor:
        """Computes rows [T * K, H], sorted by expert, each with its expert."""
        counts = torch.bincount(chosen.flatten(), minlength=self.config.count).tolist()
        output, start = torch.empty_like(rows), 0
        for index, (expert, count) in enumerate(zip(self.experts, counts, strict=True)):
            if count:
                stop = start + count
                adapted = None if lora is None else lora.part(index, start, stop)
                output[start:stop] = expert(rows[start:stop], adapted)
                start = stop
        return output
