"""Qwen 3.5, with and without experts: gated delta nets and gated attention."""

from dataclasses import dataclass

import torch

from ...checkpoints.architectures import Architecture
from ...checkpoints.config import ExpertsConfig
from ...checkpoints.fields import Fields
from ...layers.layers import Linear
from ...operators.recurrent import DeltaShape
from .layers import DeltaProjections
from .qwen3_next import Qwen3Next
from .tensors import Tensors


class Qwen35(Qwen3Next):
    """The shape of one checkpoint. Raises ConfigError for fields that are not supported."""

    architecture = Architecture(
        rms_norm_eps=1e-6,
        partial_rotary=0.25,
        max_position_embeddings=32768,
        mrope="interleaved",
        mrope_section=(11, 11, 10),
    )

    def __init__(self, fields: Fields) -> None:
        if isinstance(fields.get("text_config", None), dict):
            fields = Fields(fields.path, fields.object("text_config"), prefix="text_config.")
        super().__init__(fields)
        self.inner = fields.integer("intermediate_size", 12288)

    def _experts(self) -> ExpertsConfig | None:
        return None

    def projections(self, tensors: Tensors, prefix: str) -> DeltaProjections:
        shape, hidden = self.delta, self.hidden
        heads = shape.value_heads
        both = {f"{prefix}in_proj_b": heads, f"{prefix}in_proj_a": heads}
        return SeparateProjections(
            qkv=tensors.linear({f"{prefix}in_proj_qkv": shape.channels}, hidden),
            gate=tensors.linear({f"{prefix}in_proj_z": shape.value_width}, hidden),
            ba=tensors.linear(both, hidden, exact=True),
            shape=shape,
        )


class Qwen35Moe(Qwen35):
    """Qwen 3.5 with a mixture of experts in every layer."""

    def _experts(self) -> ExpertsConfig | None:
        return self.routed(256, 8, True, (True,) * self.layers)


@dataclass(frozen=True, slots=True)
class SeparateProjections:
    """Queries, keys and values of all heads; their gates; betas and decays."""

    qkv: Linear
    gate: Linear
    ba: Linear
    shape: DeltaShape

    def __call__(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        beta, decay = self.ba(x).chunk(2, dim=-1)
        gate = self.gate(x).view(len(x), -1, self.shape.value_dim)
        return self.qkv(x), gate, beta, decay
