"""Mamba 2: Mamba-2 layers and nothing else."""

from dataclasses import replace

from ...checkpoints.architectures import Architecture
from ...checkpoints.fields import Fields
from ...checkpoints.rope import RopeConfig
from ...operators.recurrent import Mamba2Shape
from ..base import KVShape
from .decoder import HybridWeights, ResidualPart
from .family import Family, Parts
from .mamba2 import check_steps, read_mamba2
from .tensors import Tensors

# Blocks of 16 positions that one layer's state takes.
_LAYER_BLOCKS = 4
_BLOCK_SIZE = 16


class Mamba2(Family):
    """The shape of one checkpoint. Raises ConfigError for fields that are not supported.

    No layer has KV. The pool's blocks, which hold states, are those of one layer that is never
    computed, and a sequence keeps only its last one.
    """

    architecture = Architecture(max_position_embeddings=262144)
    prefixes = ("backbone.",)
    kv_heads = 1
    head_dim = 64

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        fields.require("hidden_act", ("silu", "swish"), default="silu")
        check_steps(fields)
        self.eps = fields.number("layer_norm_epsilon", 1e-5)
        self.tied = fields.flag("tie_word_embeddings")
        self.mamba = Mamba2Shape(
            heads=fields.integer("num_heads", 128),
            head_dim=fields.integer("head_dim", 64),
            groups=fields.integer("n_groups", 8),
            state_size=fields.integer("state_size", 128),
            window=fields.integer("conv_kernel", 4),
        )
        if self.mamba.width != fields.integer("expand", 2) * self.hidden:
            raise fields.error("head_dim", f"expand * hidden_size / num_heads ({self.mamba.heads})")
        if self.mamba.heads % self.mamba.groups:
            raise fields.error("n_groups", f"a divisor of num_heads ({self.mamba.heads})")

    def rope(self) -> RopeConfig | None:
        return None

    def build(self, tensors: Tensors, parts: Parts) -> HybridWeights:
        fields, blocks = self.fields, list[ResidualPart]()
        for index in range(self.layers):
            prefix = f"{self.prefix}layers.{index}."
            norm = tensors.tensor(f"{prefix}norm.weight", self.hidden)
            mamba = read_mamba2(
                tensors, f"{prefix}mixer.", index, self.hidden, self.mamba, self.eps, parts.ops,
                conv_bias=fields.flag("use_conv_bias", True), proj_bias=fields.flag("use_bias"),
            )  # fmt: skip
            blocks.append(ResidualPart(norm, mamba))
        norm = tensors.tensor(f"{self.prefix}norm_f.weight", self.hidden)
        states = self.mamba.states(parts.dtype)
        decoder = self.decoder(
            tensors, blocks, norm, 1, self.layers, states, embedding="embeddings"
        )
        head = 2 * _BLOCK_SIZE * self.head_dim * parts.dtype.itemsize
        heads = -(-sum(tensor.num_bytes for tensor in states) // (head * _LAYER_BLOCKS))
        return replace(
            decoder,
            kv_shapes=(KVShape(heads, self.head_dim),),
            without_kv=True,
            float32_residual=fields.flag("residual_in_fp32", True),
        )
