"""Mamba, Falcon-Mamba and Mamba 2: layers with a recurrent state and nothing else."""

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch

from ...checkpoints.architectures import Architecture
from ...checkpoints.fields import Fields
from ...checkpoints.rope import RopeConfig
from ...core.recurrent_state import StateTensor
from ...operators.recurrent import Mamba2Shape
from ..base import KVShape
from .decoder import HybridWeights, ResidualPart
from .family import Family, Parts
from .layers import HybridLayer
from .mamba import MambaShape, SelectionNorms, WithMamba
from .mamba2 import WithMamba2, check_steps
from .tensors import Tensors

# Blocks of 16 positions that one layer's state takes.
_LAYER_BLOCKS = 4
_BLOCK_SIZE = 16


class WithoutAttention(Family):
    """The shape of one checkpoint. Raises ConfigError for fields that are not supported.

    No layer has KV. The pool's blocks, which hold states, are those of one layer that is never
    computed, and a sequence keeps only its last one.
    """

    architecture = Architecture(max_position_embeddings=262144)
    prefixes = ("backbone.",)
    embedding = "embeddings"
    kv_heads = 1
    head_dim = 64
    heads = 0
    # Whether output and embedding are one matrix if config.json does not say.
    ties: ClassVar[bool]

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        fields.require("hidden_act", ("silu", "swish"), default="silu")
        self.eps = fields.number("layer_norm_epsilon", 1e-5)
        self.tied = fields.flag("tie_word_embeddings", self.ties)
        self.width = fields.integer("expand", 2) * self.hidden
        self.window = fields.integer("conv_kernel", 4)
        self.conv_bias = fields.flag("use_conv_bias", True)
        self.proj_bias = fields.flag("use_bias")

    @abstractmethod
    def state_tensors(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The state of one layer."""

    @abstractmethod
    def layer(self, tensors: Tensors, parts: Parts, prefix: str, index: int) -> HybridLayer:
        """Reads the layer whose tensors' names begin with `prefix`."""

    def rope(self) -> RopeConfig | None:
        return None

    def build(self, tensors: Tensors, parts: Parts) -> HybridWeights:
        blocks = list[ResidualPart]()
        for index in range(self.layers):
            prefix = f"{self.prefix}layers.{index}."
            norm = tensors.tensor(f"{prefix}norm.weight", self.hidden)
            blocks.append(ResidualPart(norm, self.layer(tensors, parts, f"{prefix}mixer.", index)))
        norm = tensors.tensor(f"{self.prefix}norm_f.weight", self.hidden)
        states = self.state_tensors(parts.dtype)
        decoder = self.decoder(tensors, blocks, norm, 1, self.layers, states)
        head = 2 * _BLOCK_SIZE * self.head_dim * parts.dtype.itemsize
        heads = -(-sum(tensor.num_bytes for tensor in states) // (head * _LAYER_BLOCKS))
        return replace(
            decoder,
            kv_shapes=(KVShape(heads, self.head_dim),),
            without_kv=True,
            float32_residual=self.fields.flag("residual_in_fp32", True),
        )


class Mamba(WithMamba, WithoutAttention):
    """Mamba layers."""

    ties = True
    mamba_part = ".mixer."
    width_name = "intermediate_size"
    norms: ClassVar[SelectionNorms] = "none"

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        rank = fields.get("time_step_rank", "auto")
        self.mamba = MambaShape(
            width=fields.integer("intermediate_size", self.width),
            state_size=fields.integer("state_size", 16),
            rank=-(-self.hidden // 16) if rank == "auto" else fields.integer("time_step_rank"),
            window=self.window,
        )

    def state_tensors(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        return self.mamba.states(dtype)

    def layer(self, tensors: Tensors, parts: Parts, prefix: str, index: int) -> HybridLayer:
        eps = self.fields.number("mixer_rms_eps", 1e-6)
        return self.mamba_layer(
            tensors, parts.ops, prefix, index, eps=eps,
            conv_bias=self.conv_bias, proj_bias=self.proj_bias, norms=self.norms,
        )  # fmt: skip


class FalconMamba(Mamba):
    """Mamba layers with norms of time steps, B and C, which have no weights."""

    norms = "unit"


class Mamba2(WithMamba2, WithoutAttention):
    """Mamba-2 layers."""

    ties = False
    mamba_part = ".mixer."
    mamba_names = ("num_heads", "n_groups")

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        check_steps(fields)
        self.mamba = Mamba2Shape(
            heads=fields.integer("num_heads", 128),
            head_dim=fields.integer("head_dim", 64),
            groups=fields.integer("n_groups", 8),
            state_size=fields.integer("state_size", 128),
            window=self.window,
        )
        if self.mamba.width != self.width:
            raise fields.error("head_dim", f"expand * hidden_size / num_heads ({self.mamba.heads})")
        if self.mamba.heads % self.mamba.groups:
            raise fields.error("n_groups", f"a divisor of num_heads ({self.mamba.heads})")

    def state_tensors(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        return self.mamba.states(dtype)

    def layer(self, tensors: Tensors, parts: Parts, prefix: str, index: int) -> HybridLayer:
        return self.mamba2(
            tensors, parts.ops, prefix, index,
            conv_bias=self.conv_bias, proj_bias=self.proj_bias,
        )  # fmt: skip
