"""Falcon-H1: each layer has attention and a Mamba-2 layer side by side, then an MLP."""

from dataclasses import replace
from typing import Self

import torch

from ...checkpoints.architectures import Architecture
from ...checkpoints.fields import Fields
from ...core.errors import ConfigError
from ...layers.feed_forward import GatedMLP
from ...operators.base import Ops
from ..parallel import Shard
from .decoder import HybridWeights, ResidualPart
from .family import Parts
from .layers import AttentionLayer, FeedForwardLayer, ParallelLayers, ScaledLinear
from .mamba2 import Mamba2Layer, WithMamba2, read_shape
from .tensors import Tensors


class FalconH1(WithMamba2):
    """The shape of one checkpoint. Raises ConfigError for fields that are not supported."""

    architecture = Architecture(max_position_embeddings=8192)

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        fields.require("hidden_act", ("silu", "swish"), default="silu")
        self.read_heads()
        self.bias = fields.flag("attention_bias")
        self.eps = fields.number("rms_norm_eps", 1e-5)
        self.tied = fields.flag("tie_word_embeddings")
        self.inner = fields.integer("intermediate_size", 14336)
        self.mlp_bias = fields.flag("mlp_bias")
        width = fields.optional_integer("mamba_d_ssm", 1024)
        expanded = fields.integer("mamba_expand", 2) * self.hidden
        self.mamba = read_shape(fields, expanded if width is None else width)
        self.normed = fields.flag("mamba_rms_norm")
        self.norm_first = fields.flag("mamba_norm_before_gate", True)
        self.gate, self.down = self._multipliers("mlp_multipliers", 2)
        self.projected = self._multipliers("ssm_multipliers", 5)

    def _multipliers(self, name: str, count: int) -> tuple[float, ...]:
        given = self.fields.get(name, None)
        return (1.0,) * count if given is None else self.fields.numbers(name, count)

    def _multiplier(self, name: str) -> float:
        return self.fields.number(f"{name}_multiplier", 1.0)

    def check_ranks(self, size: int, expert_parallel: bool) -> None:
        super().check_ranks(size, expert_parallel)
        groups = self.mamba.groups
        if self.normed and self.norm_first and groups < size:
            raise ConfigError(
                f"{self.fields.path}: tensor_parallel_size {size} is above mamba_n_groups "
                f"({groups}), and mamba_norm_before_gate normalises each group before its gate: "
                f"use at most {groups}"
            )

    def inner_sizes(self) -> dict[str, int]:
        return {"intermediate_size": self.inner}

    def divided(self, shard: Shard) -> Self:
        part = super().divided(shard)
        part.inner = shard.inner_size(self.inner)
        return part

    def build(self, tensors: Tensors, parts: Parts) -> HybridWeights:
        blocks: list[ResidualPart] = []
        for index in range(self.layers):
            prefix = f"{self.prefix}layers.{index}."
            norm = tensors.tensor(f"{prefix}input_layernorm.weight", self.hidden)
            mamba = self._mamba(tensors, parts.ops, f"{prefix}mamba.", index)
            attention = self._attention(tensors, parts, f"{prefix}self_attn.", index)
            blocks.append(ResidualPart(norm, ParallelLayers((mamba, attention))))
            norm = tensors.tensor(f"{prefix}pre_ff_layernorm.weight", self.hidden)
            mlp = self._mlp(tensors, parts, f"{prefix}feed_forward.")
            blocks.append(ResidualPart(norm, FeedForwardLayer(mlp)))
        norm = tensors.tensor(f"{self.prefix}final_layernorm.weight", self.hidden)
        return self.decoder(
            tensors, blocks, norm, self.layers, self.layers, self.mamba.states(parts.dtype),
            embedding_scale=self._multiplier("embedding"),
            logits_divisor=1.0 / self._multiplier("lm_head"),
        )  # fmt: skip

    def _mamba(self, tensors: Tensors, ops: Ops, prefix: str, index: int) -> Mamba2Layer:
        fields, shape = self.fields, self.mamba
        layer = self.mamba2(
            tensors, ops, prefix, index,
            conv_bias=fields.flag("mamba_conv_bias", True),
            proj_bias=fields.flag("mamba_proj_bias"),
            output_bias=fields.flag("projectors_bias"),
            normed=self.normed,
            norm_first=self.norm_first,
        )  # fmt: skip
        shared = shape.groups * shape.state_size
        widths = (shape.width, shape.width, shared, shared, shape.heads)
        scales = _scales(tensors, self.projected, widths)
        return replace(
            layer,
            input=ScaledLinear(layer.input, self._multiplier("ssm_in"), scales),
            output=ScaledLinear(layer.output, after=self._multiplier("ssm_out")),
        )

    def _attention(self, tensors: Tensors, parts: Parts, prefix: str, index: int) -> AttentionLayer:
        layer = self.attention(
            tensors, parts, prefix, index, scale=self.head_dim**-0.5, bias=self.bias
        )
        before, width = self._multiplier("attention_in"), self.kv_heads * self.head_dim
        scales = _scales(tensors, (self._multiplier("key"), 1.0), (width, width))
        return replace(
            layer,
            query=ScaledLinear(layer.query, before),
            key_value=ScaledLinear(layer.key_value, before, scales),
            output=ScaledLinear(layer.output, after=self._multiplier("attention_out")),
        )

    def _mlp(self, tensors: Tensors, parts: Parts, prefix: str) -> GatedMLP:
        mlp = self.gated_mlp(tensors, parts, prefix, self.inner, bias=self.mlp_bias)
        scales = _scales(tensors, (self.gate, 1.0), (self.inner, self.inner))
        return replace(
            mlp,
            gate_up=ScaledLinear(mlp.gate_up, after=scales),
            down=ScaledLinear(mlp.down, after=self.down),
        )


def _scales(tensors: Tensors, scales: tuple[float, ...], widths: tuple[int, ...]) -> torch.Tensor:
    """Each scale for as many elements as its width."""
    parts = [torch.full((width,), scale) for scale, width in zip(scales, widths, strict=True)]
    return tensors.place(torch.cat(parts))
