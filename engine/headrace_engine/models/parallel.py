"""Tensor parallelism: which part of a decoder each rank holds, after Megatron-LM
(https://arxiv.org/abs/1909.08053).

QKV, gate and up are split by their outputs, O and down by their inputs, the embedding and the head
by the vocabulary. Latents have no heads: each rank makes and keeps all of them. With expert
parallelism the experts of a mixture are not split; each rank has some of them. This module only
decides; others join the parts again.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from ..checkpoints.config import ExpertsConfig, ModelConfig
from ..checkpoints.tensor_files import WHOLE, Portion, Shape
from ..core.errors import ConfigError
from ..layers.float8_weight import Float8Weight
from ..layers.mxfp4_weight import MXFP4Weight
from ..layers.quantized_weight import QuantizedWeight

_BY_OUTPUT = re.compile(r"\.((q_proj|q_b_proj|kv_b_proj|gate_proj|up_proj)\.(weight|bias)|sinks)$")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
# The number of an expert, in the name of a tensor of one expert.
EXPERT = re.compile(r"\.experts\.(\d+)\.")
_BY_HEAD = re.compile(r"\.(k_proj|v_proj)\.(weight|bias)$")
_BY_INPUT = re.compile(r"\.(o_proj|down_proj)\.weight$")
_INNER = re.compile(r"\.(gate|up|down)_proj\.")
# Inner sizes are cut between groups of 32, which share a scale in MXFP4 and GGUF.
_GROUP = 32
# Biases of layers whose outputs are summed over the ranks: only one rank adds them.
_ONCE = re.compile(r"\.(o_proj|down_proj)\.bias$")
# Also those of a layer for drafts.
_VOCABULARY = re.compile(r"(^|\.)(embed_tokens|lm_head|shared_head\.head)\.weight$")


Stored = TypeVar("Stored", QuantizedWeight, Float8Weight, MXFP4Weight)


class Collectives(Protocol):
    """Operations that all ranks call together, in the same order."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' x, the same bits on all of them; may be written into x."""

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The ranks' x, all of one shape, on rank 0; an empty list on the others."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` ranks. With `expert_parallel` ranks have whole experts of mixtures."""

    rank: int
    size: int
    collectives: Collectives
    expert_parallel: bool = False

    def share(self, length: int) -> tuple[int, int]:
        """This rank's [start, stop) of `length`; shares differ by at most one."""
        return self.rank * length // self.size, (self.rank + 1) * length // self.size

    def inner(self, length: int) -> tuple[int, int]:
        """This rank's [start, stop) of the inner size of a feed-forward layer: shares differ by at
        most one group of 32, if it has as many groups as there are ranks."""
        group = _inner_group(length, self.size)
        start, stop = self.share(length // group)
        return start * group, stop * group

    def inner_size(self, length: int) -> int:
        start, stop = self.inner(length)
        return stop - start

    def experts(self, count: int) -> tuple[int, int]:
        """This rank's [start, stop) of `count` experts; the first ranks have one more than the
        others if they are not divisible (vLLM's linear placement)."""
        each, more = divmod(count, self.size)
        start = self.rank * each + min(self.rank, more)
        return start, start + each + (self.rank < more)


def _inner_group(length: int, size: int) -> int:
    """Between how many inputs an inner size is cut for `size` ranks."""
    return _GROUP if length % _GROUP == 0 and length // _GROUP >= size else 1


def check_divisible(config: ModelConfig, size: int, expert_parallel: bool = False) -> None:
    """Raises ConfigError for a decoder that cannot be divided among `size` ranks."""
    if expert_parallel:
        inner = _counts_beside_experts(config, experts_to_spread(config.experts, size))
    else:
        inner = {"intermediate_size": config.intermediate_size}
        if config.experts is not None:
            inner |= expert_sizes(config.experts)
    kv_heads = {config.kv_heads(layer) for layer in range(config.num_layers)}
    counts = {"num_attention_heads": config.num_heads}
    shared = [("num_key_value_heads", count) for count in kv_heads]
    check_counts(size, counts, inner, shared, config.vocab_size)


def check_counts(
    size: int,
    counts: Mapping[str, int],
    inner: Mapping[str, int],
    shared: Collection[tuple[str, int]],
    vocabulary: int,
) -> None:
    """Raises ConfigError if `size` ranks cannot divide these numbers, which config.json names,
    inner sizes of MLPs, numbers of heads of which several ranks may have the same one (`shared`),
    and the vocabulary."""
    uncut = {name: count for name, count in inner.items() if _inner_group(count, size) == 1}
    for name, count in {**counts, **uncut}.items():
        if count % size:
            raise ConfigError(
                f"tensor_parallel_size {size} does not divide {name} ({count}) of this model: "
                "use a divisor"
            )
    for name, heads in shared:
        if heads % size and size % heads:
            raise ConfigError(
                f"tensor_parallel_size {size} neither divides {name} ({heads}) of this model nor "
                "is a multiple of it: use a divisor or a multiple"
            )
    if vocabulary < size:
        raise ConfigError(
            f"tensor_parallel_size {size} is above vocab_size ({vocabulary}): lower it"
        )


def expert_sizes(experts: ExpertsConfig) -> dict[str, int]:
    return {"moe_intermediate_size": experts.intermediate_size, **shared_counts(experts)}


def shared_counts(experts: ExpertsConfig) -> dict[str, int]:
    shared = experts.shared_size
    return {} if shared is None else {"shared_expert_intermediate_size": shared}


def experts_to_spread(experts: ExpertsConfig | None, size: int) -> ExpertsConfig:
    """The mixture whose experts are spread over `size` ranks. Raises ConfigError."""
    if experts is None:
        raise ConfigError(
            "enable_expert_parallel is on, but this model has no mixture of experts: switch it off"
        )
    if experts.count < size:
        raise ConfigError(
            f"enable_expert_parallel gives each of {size} ranks whole experts, and this model has "
            f"{experts.count}: lower tensor_parallel_size, or switch enable_expert_parallel off"
        )
    return experts


def _counts_beside_experts(config: ModelConfig, experts: ExpertsConfig) -> dict[str, int]:
    """The inner sizes that are divided although experts are whole."""
    dense = {} if all(experts.sparse) else {"intermediate_size": config.intermediate_size}
    return dense | shared_counts(experts)


def place_experts(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The configuration with the experts of one rank, if ranks have whole ones."""
    experts = config.experts
    if experts is None or not shard.expert_parallel:
        return config
    return replace(config, experts=spread_experts(experts, shard))


def spread_experts(experts: ExpertsConfig, shard: Shard) -> ExpertsConfig:
    """The mixture with the experts of one rank, if ranks have whole ones."""
    local = shard.experts(experts.count) if shard.expert_parallel else None
    return replace(experts, local_range=local)


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The shape of one rank's part; the vocabulary stays whole. If there are more ranks than KV
    heads, ranks share heads and each has one."""
    size = shard.size
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        window_kv_heads=None
        if config.window_kv_heads is None
        else max(1, config.window_kv_heads // size),
        intermediate_size=shard.inner_size(config.intermediate_size),
        experts=None if config.experts is None else shard_experts(config.experts, shard),
    )


def shard_experts(experts: ExpertsConfig, shard: Shard) -> ExpertsConfig:
    experts = spread_experts(experts, shard)
    shared, inner = experts.shared_size, experts.intermediate_size
    return replace(
        experts,
        intermediate_size=shard.inner_size(inner) if experts.local_range is None else inner,
        shared_size=None if shared is None else shard.inner_size(shared),
    )


class Cuts(Protocol):
    """Splits a checkpoint's tensors, by their names, which a decoder's source of tensors knows."""

    def reads(self, name: str) -> bool:
        """Whether this rank reads any part of a tensor."""

    def shape(self, name: str, whole: Shape) -> Shape:
        """The shape of this rank's part."""

    def portion(self, name: str, whole: Shape) -> Portion:
        """The part of a stored tensor that this rank reads ahead."""

    def tensor(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part."""

    def quantized(self, name: str, whole: Stored) -> Stored:
        """This rank's part. Raises ConfigError if a cut falls inside a group of inputs."""


def cut_columns(name: str, whole: Stored, start: int, stop: int, size: int) -> Stored:
    """Inputs [start, stop) of a quantised matrix, for one of `size` ranks. Raises ConfigError if a
    cut falls inside a group of inputs."""
    if not whole.can_cut(start, stop):
        inputs, groups = whole.shape[1], whole.scales.shape[1]
        raise ConfigError(
            f"tensor_parallel_size {size} cuts the {inputs} inputs of {name} within one of its "
            f"{groups} quantisation groups: use a smaller size, or a checkpoint with smaller groups"
        )
    return whole.columns(start, stop)


class WeightCuts:
    """Splits a checkpoint's tensors, by the decoder's names for them."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        self._shard, self._config = shard, config
        self._cuts_norms = config.wide_qk_norm
        experts = config.experts
        self._whole = None if experts is None or experts.local_range is None else experts.local

    def reads(self, name: str) -> bool:
        """Whether this rank reads any part of a tensor: not if it belongs to another rank's
        expert."""
        found = EXPERT.search(name)
        return self._whole is None or found is None or int(found[1]) in self._whole

    def shape(self, name: str, whole: Shape) -> Shape:
        """The shape of this rank's part."""
        cut = self._cut(name, whole)
        if cut is None:
            return whole
        dimension, start, stop = cut
        return (*whole[:dimension], stop - start, *whole[dimension + 1 :])

    def portion(self, name: str, whole: Shape) -> Portion:
        return WHOLE

    def ranges(self, name: str, whole: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """[start, stop) of this rank's outputs and inputs of a matrix [out, in]."""
        cut = self._cut(name, whole)
        if cut is None:
            return (0, whole[0]), (0, whole[1])
        dimension, start, stop = cut
        part = (start, stop)
        return ((0, whole[0]), part) if dimension else (part, (0, whole[1]))

    def tensor(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part, as a view of the whole."""
        if self._shard.rank and _ONCE.search(name) and not self._is_whole(name):
            return torch.zeros_like(whole)
        cut = self._cut(name, tuple(whole.shape))
        if cut is None:
            return whole
        dimension, start, stop = cut
        return whole.narrow(dimension, start, stop - start)

    def quantized(self, name: str, whole: Stored) -> Stored:
        """This rank's part. Raises ConfigError if a cut falls inside a group of inputs."""
        cut = self._cut(name, whole.shape)
        if cut is None:
            return whole
        dimension, start, stop = cut
        if dimension == 0:
            return whole.rows(start, stop)
        return cut_columns(name, whole, start, stop, self._shard.size)

    def _cut(self, name: str, whole: Shape) -> tuple[int, int, int] | None:
        """(dimension, start, stop); None if the tensor stays whole."""
        if self._is_whole(name):
            return None
        if self._cuts_norms:  # of Q and K, like their outputs
            name = name.replace("_norm.", "_proj.")
        share = self._shard.inner if _INNER.search(name) else self._shard.share
        if _VOCABULARY.search(name) or _BY_OUTPUT.search(name):
            return (0, *share(whole[0]))
        if _BY_INPUT.search(name):
            return (1, *share(whole[1]))
        if _BY_HEAD.search(name):
            return (0, *self._heads(whole[0], self._kv_heads(name)))
        return None

    def _is_whole(self, name: str) -> bool:
        """Whether a tensor belongs to an expert that is not split."""
        return self._whole is not None and EXPERT.search(name) is not None

    def _kv_heads(self, name: str) -> int:
        """The number of KV heads of the layer that a tensor belongs to."""
        layer = _LAYER.search(name)
        assert layer is not None, f"{name} belongs to no layer"
        return self._config.kv_heads(int(layer[1]))

    def _heads(self, length: int, kv_heads: int) -> tuple[int, int]:
        if kv_heads % self._shard.size == 0:
            return self._shard.share(length)
        head = self._shard.rank * kv_heads // self._shard.size
        width = length // kv_heads
        return head * width, (head + 1) * width
