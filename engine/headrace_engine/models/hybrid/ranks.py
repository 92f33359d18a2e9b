"""One rank's part of a hybrid decoder: which parts of its tensors, and where the ranks' results are
joined: sums after the embedding and after every part, and gathered logits.

Heads of attention and of recurrent layers are divided, and with them KV and states.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import torch

from ...checkpoints.config import ExpertsConfig
from ...checkpoints.tensor_files import WHOLE, Portion, Shape
from ...layers.float8_weight import Float8Weight
from ...layers.float8_weight import stack as stack_float8
from ...layers.layers import Linear
from ...layers.mxfp4_weight import MXFP4Weight
from ...layers.mxfp4_weight import stack as stack_mxfp4
from ...layers.quantized_weight import QuantizedWeight
from ...layers.quantized_weight import stack as stack_integers
from ...lora.shapes import LocalPart
from ...operators.base import Ops
from ..decoder.parallel_decoder import GatheredHead, look_up, summed
from ..parallel import EXPERT, Shard, Stored, cut_columns
from ..rotary.rotary import RotaryTable
from .adapters import AdaptedLayers
from .decoder import HybridDecoder, HybridWeights
from .mtp import HybridMTPHead, HybridMTPWeights

_STACKS: Mapping[type, Callable[[Any], Any]] = {
    QuantizedWeight: stack_integers,
    Float8Weight: stack_float8,
    MXFP4Weight: stack_mxfp4,
}


@dataclass(frozen=True, slots=True)
class SharedHeads:
    """A segment of `count` heads of `width` elements each. If there are more ranks than heads,
    several ranks have the same head."""

    count: int
    width: int


@dataclass(frozen=True, slots=True)
class Division:
    """How ranks divide one dimension of a tensor.

    It consists of `segments`, given by their lengths, of which each rank has its share. `inner`
    sizes of MLPs are cut between groups of 32. Of `experts`, of which the segment is the number,
    each rank has whole ones. With "once" the first rank has the tensor, and the others have zeros.
    """

    dimension: int
    segments: tuple[int | SharedHeads, ...]
    kind: Literal["even", "inner", "experts", "once"] = "even"


class Divisible(Protocol):
    """The shape of a decoder that ranks may share."""

    experts: ExpertsConfig | None
    # How names of tensors with all experts of a mixture end.
    stacked_experts: ClassVar[tuple[str, ...]]

    def division(self, name: str, whole: Shape) -> Division | None:
        """How ranks divide a tensor; None: each of them has all of it."""


class HybridCuts:
    """Splits the tensors of a checkpoint, by their names there."""

    def __init__(self, family: Divisible, shard: Shard) -> None:
        self._family, self._shard = family, shard
        experts = family.experts if shard.expert_parallel else None
        # The experts of this rank; None if each rank has a part of all of them.
        self.own_experts = None if experts is None else range(*shard.experts(experts.count))

    def reads(self, name: str) -> bool:
        found, own = EXPERT.search(name), self.own_experts
        return own is None or found is None or int(found[1]) in own

    def portion(self, name: str, whole: Shape) -> Portion:
        experts, own = self._family.experts, self.own_experts
        if own is None or experts is None or not name.endswith(self._family.stacked_experts):
            return WHOLE
        return Portion(own.start, own.stop, experts.count)

    def shape(self, name: str, whole: Shape) -> Shape:
        found = self._division(name, whole)
        if found is None or found.kind == "once":
            return whole
        at = found.dimension
        return (*whole[:at], self._local(found, whole[at]).width, *whole[at + 1 :])

    def tensor(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        found = self._division(name, tuple(whole.shape))
        if found is None:
            return whole
        if found.kind == "once":
            return torch.zeros_like(whole) if self._shard.rank else whole
        at = found.dimension
        runs = self._local(found, whole.shape[at]).runs
        parts = [whole.narrow(at, start, stop - start) for start, stop in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=at)

    def quantized(self, name: str, whole: Stored) -> Stored:
        experts = self._family.experts
        if experts is not None and name.endswith(self._family.stacked_experts):
            return self._quantized_experts(name, whole, experts.count)
        found = self._division(name, whole.shape)
        if found is None:
            return whole
        runs = self._local(found, whole.shape[found.dimension]).runs
        if found.dimension == 0:
            return _stacked([whole.rows(start, stop) for start, stop in runs])
        ((start, stop),) = runs
        return cut_columns(name, whole, start, stop, self._shard.size)

    def _quantized_experts(self, name: str, whole: Stored, count: int) -> Stored:
        """This rank's part of the matrices of all experts, whose outputs follow each other."""
        rows, inputs = whole.shape[0] // count, whole.shape[1]
        found = self._division(name, (count, rows, inputs))
        assert found is not None, "experts are divided"
        runs = self._local(found, (count, rows, inputs)[found.dimension]).runs
        if found.dimension == 2:
            ((start, stop),) = runs
            return cut_columns(name, whole, start, stop, self._shard.size)
        if found.dimension == 0:
            return _stacked([whole.rows(start * rows, stop * rows) for start, stop in runs])
        begins = range(0, count * rows, rows)
        return _stacked(
            [whole.rows(at + start, at + stop) for at in begins for start, stop in runs]
        )

    def local(self, name: str, whole: Shape, dimension: int) -> LocalPart:
        """This rank's part of a dimension of a tensor."""
        found = self._division(name, whole)
        total = whole[dimension]
        if found is None or found.dimension != dimension or found.kind == "once":
            return LocalPart(total, ((0, total),))
        return self._local(found, total)

    def _division(self, name: str, whole: Shape) -> Division | None:
        experts = self._family.experts
        if self.own_experts is not None and experts is not None:
            if name.endswith(self._family.stacked_experts):
                return Division(0, (experts.count,), "experts")
            if EXPERT.search(name):
                return None
        return self._family.division(name, whole)

    def _local(self, division: Division, total: int) -> LocalPart:
        runs, begin, shard = [], 0, self._shard
        shares = {"inner": shard.inner, "experts": shard.experts}
        share = shares.get(division.kind, shard.share)
        for segment in division.segments:
            if isinstance(segment, SharedHeads):
                length, width = segment.count * segment.width, segment.width
                first = shard.rank * segment.count // shard.size
                start, stop = first * width, (first + max(1, segment.count // shard.size)) * width
            else:
                length = segment
                start, stop = share(length)
            runs.append((begin + start, begin + stop))
            begin += length
        return LocalPart(total, tuple(runs))


def _stacked(parts: Sequence[Stored]) -> Stored:
    """The rows of parts of one matrix, one part after the other."""
    if len(parts) == 1:
        return parts[0]
    found: Stored | None = _STACKS[type(parts[0])](parts)
    assert found is not None, "rows of one matrix have one format"
    return found


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """A linear layer whose inputs are divided among the ranks."""

    own: Linear
    shard: Shard

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return summed(self.own(x), self.shard.collectives)


class ParallelHybridDecoder(HybridDecoder):
    """One rank's decoder. `weights` are this rank's part; `vocabulary` is the number of rows of the
    whole embedding. Logits are complete on rank 0 and undefined on other ranks."""

    def __init__(
        self,
        weights: HybridWeights,
        ops: Ops,
        rotary: RotaryTable,
        adapters: AdaptedLayers,
        *,
        shard: Shard,
        vocabulary: int,
    ) -> None:
        head = GatheredHead(weights.lm_head, vocabulary, shard)
        super().__init__(replace(weights, lm_head=head), ops, rotary, adapters)
        self.vocab_size, self._shard = vocabulary, shard
        self._first, _ = shard.share(vocabulary)

    def _lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return look_up(ids, self._weights.embedding, self._first, self._shard.collectives)

    def _join(self, added: torch.Tensor) -> torch.Tensor:
        return summed(added.contiguous(), self._shard.collectives)


class ParallelHybridMTPHead(HybridMTPHead):
    """One rank's part of an MTP layer. `weights` are this rank's; `vocabulary` is the number of
    rows of the whole embedding. Logits are complete on rank 0 and undefined on other ranks."""

    def __init__(
        self,
        weights: HybridMTPWeights,
        ops: Ops,
        rotary: RotaryTable,
        *,
        shard: Shard,
        vocabulary: int,
    ) -> None:
        head = GatheredHead(weights.lm_head, vocabulary, shard)
        super().__init__(replace(weights, lm_head=head), ops, rotary)
        self._shard = shard
        self._first, _ = shard.share(vocabulary)

    def _lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return look_up(ids, self._weights.embedding, self._first, self._shard.collectives)

    def _join(self, added: torch.Tensor) -> torch.Tensor:
        return summed(added.contiguous(), self._shard.collectives)
