"""Packed int4 and int8 weights in the layout of the Triton kernels (kernels/triton/packed.py).

Each group of inputs becomes runs of one length, whatever the checkpoint's order of inputs. If
groups are not contiguous, inputs are reordered, with padding that contributes nothing.
"""

from dataclasses import dataclass, replace

import torch

from ..kernels.triton.packed_launch import E2M1, READ
from .mxfp4_weight import MXFP4Weight
from .quantized_weight import QuantizedWeight

WORD_BITS = 16
# Inputs of a run, the width of a tile of words. Tensor cores need at least 16.
RUNS = (64, 32, 16)
# A longer run may increase the number of inputs, with padding, by at most this factor.
MORE = 1.1


class _ZeroPoints:
    """The zero points as kernels take them; kernels without zero points ignore the pointer."""

    __slots__ = ()
    scales: torch.Tensor
    zeros: torch.Tensor | None
    zero: int

    @property
    def kernel_zero(self) -> int:
        """Compile-time constant of the kernels: the one zero point of all, or READ."""
        return self.zero if self.zeros is None else READ

    @property
    def zero_points(self) -> torch.Tensor:
        return self.scales if self.zeros is None else self.zeros


@dataclass(frozen=True, slots=True)
class PackedWeight(_ZeroPoints):
    """weight[o, i] = (value - zero point) * scale, for inputs in the order of `order`.

    words   int16 [steps, out, run]: each has one number of each of 16 / bits successive runs of
            `run` inputs, the first in the lowest bits.
    scales  [groups, out], groups of `group` inputs; `group` 0 means one group.
    zeros   uint8 [groups, out], or None if all are `zero`; `zero` E2M1 marks 4-bit floats.
    order   int64 [steps * run * 16 / bits], or None for inputs in their order. Padding is input 0.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    zero: int
    group: int
    bits: int
    order: torch.Tensor | None

    @property
    def outputs(self) -> int:
        return self.words.shape[-2]

    @property
    def inputs(self) -> int:
        """Number of inputs, with padding."""
        return self.words.shape[-3] * self.words.shape[-1] * (WORD_BITS // self.bits)

    @property
    def num_bytes(self) -> int:
        """Bytes of one matrix that a product reads."""
        parts = [self.words, self.scales, *([] if self.zeros is None else [self.zeros])]
        return sum(part.numel() * part.element_size() for part in parts)


def pack_quantized(weight: QuantizedWeight, device: torch.device) -> PackedWeight:
    """Packs a weight for a device. Widths below 4 bits are stored in 4."""
    bits = 4 if weight.bits <= 4 else 8
    found = _in_runs(weight, WORD_BITS // bits)
    zero = int(found.zeros[0, 0])
    equal = bool((found.zeros == zero).all())
    return PackedWeight(
        words=_words(found.values.to(device), bits, found.run),
        scales=_narrowest(found.scales.T.contiguous()).to(device),
        zeros=None if equal else found.zeros.T.to(torch.uint8).contiguous().to(device),
        zero=zero,
        group=found.group,
        bits=bits,
        order=None if found.order is None else found.order.to(device),
    )


def pack_mxfp4(weight: MXFP4Weight, device: torch.device) -> PackedWeight:
    """Packs the codes as 4-bit integers and marks them as E2M1."""
    return replace(pack_quantized(weight.codes(), device), zero=E2M1)


@dataclass(frozen=True, slots=True)
class GroupedPackedWeight(_ZeroPoints):
    """E packed matrices of one shape: words [E, steps, out, run], scales and zeros [E, groups,
    out], bias [E, out]. `inputs` are in the original order; padding follows the last one."""

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    zero: int
    group: int
    bits: int
    inputs: int
    bias: torch.Tensor | None = None

    @property
    def values(self) -> torch.Tensor:
        return self.words

    @property
    def outputs(self) -> int:
        return self.words.shape[2]


class PackedWeightStack:
    """Fills a GroupedPackedWeight, one matrix after the other."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._words: torch.Tensor | None = None
        self._inputs: int | None = None
        self._taken: list[PackedWeight] = []

    def take(self, packed: PackedWeight) -> bool:
        """Stacks a matrix and returns True; False if it differs in kind from those before it."""
        if self._words is None:
            self._words = packed.words.new_empty(self._count, *packed.words.shape)
            self._inputs = _inputs_in_order(packed)
        first = self._taken[0] if self._taken else packed
        own = (packed.words.shape, packed.bits, packed.group, _inputs_in_order(packed))
        kind = (self._words.shape[1:], first.bits, first.group, self._inputs)
        if own != kind or _are_floats(packed) != _are_floats(first):
            return False
        if self._inputs is None:
            return False
        self._words[len(self._taken)].copy_(packed.words)
        self._taken.append(replace(packed, words=self._words[len(self._taken)]))
        return True

    def made(self) -> GroupedPackedWeight:
        assert self._words is not None and self._inputs is not None, "some were taken"
        first = self._taken[0]
        equal = all(one.zeros is None and one.zero == first.zero for one in self._taken)
        kinds = {one.scales.dtype for one in self._taken}
        dtype = kinds.pop() if len(kinds) == 1 else torch.float32
        return GroupedPackedWeight(
            words=self._words,
            scales=torch.stack([one.scales.to(dtype) for one in self._taken]),
            zeros=None if equal else torch.stack([_zeros(one) for one in self._taken]),
            zero=first.zero,
            group=first.group,
            bits=first.bits,
            inputs=self._inputs,
        )


def _inputs_in_order(packed: PackedWeight) -> int | None:
    """Number of inputs without padding; None if inputs are in another order."""
    order = packed.order
    if order is None:
        return packed.inputs
    count = int(order.max()) + 1
    usual = torch.arange(count, device=order.device)
    return count if torch.equal(order[:count], usual) else None


def _are_floats(packed: PackedWeight) -> bool:
    return packed.zero == E2M1


def _zeros(packed: PackedWeight) -> torch.Tensor:
    if packed.zeros is not None:
        return packed.zeros
    return torch.full(
        packed.scales.shape, packed.zero, dtype=torch.uint8, device=packed.words.device
    )


@dataclass(frozen=True, slots=True)
class _Runs:
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group: int
    run: int
    order: torch.Tensor | None


def _in_runs(weight: QuantizedWeight, per_word: int) -> _Runs:
    inputs, count = weight.shape[1], weight.scales.shape[1]
    group = 0 if count == 1 else inputs // count
    for run in RUNS:
        if (weight.groups is None or count == 1) and not (inputs % (run * per_word) or group % run):
            return _Runs(weight.values, weight.scales, weight.zeros, group, run, None)
    return _filled(weight, per_word)


def _filled(weight: QuantizedWeight, per_word: int) -> _Runs:
    """Sorts inputs by group, pads each group to one length, and pads the total to whole steps. The
    value of padding is the zero point, and after the last group its scale is 0."""
    count = weight.scales.shape[1]
    groups = weight.groups
    if groups is None:
        numbers = torch.arange(weight.shape[1], device=weight.values.device)
        groups = numbers // (weight.shape[1] // count)
    sizes = torch.bincount(groups, minlength=count)
    run, group = _lengths(int(sizes.max()), count, per_word)
    length = -(-count * group // (run * per_word)) * run * per_word
    total = -(-length // group)
    starts = sizes.cumsum(0) - sizes
    by_group = groups.argsort(stable=True)
    owner = groups[by_group]
    numbers = torch.arange(len(groups), device=groups.device)
    places = owner * group + numbers - starts[owner]
    order = numbers.new_zeros(length).index_copy_(0, places, by_group)
    scales, zeros = (weight.scales.new_zeros(len(weight.values), total) for _ in range(2))
    scales[:, :count], zeros[:, :count] = weight.scales, weight.zeros
    values = zeros.to(torch.uint8).repeat_interleave(group, dim=1)[:, :length]
    values[:, places] = weight.values[:, by_group]
    return _Runs(values, scales, zeros, 0 if count == 1 and total == 1 else group, run, order)


def _lengths(largest: int, count: int, per_word: int) -> tuple[int, int]:
    """(run, group) for groups of up to `largest` inputs: the longest run that adds little
    padding."""
    found = [(run, -(-largest // run) * run) for run in RUNS]

    def inputs(run: int, group: int) -> int:
        return -(-count * group // (run * per_word)) * run * per_word

    fewest = min(inputs(*one) for one in found)
    return next(one for one in found if inputs(*one) <= MORE * fewest)


def _words(values: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Packs uint8 [out, in] into int16 [steps, out, run]."""
    per_word = WORD_BITS // bits
    runs = values.view(len(values), -1, per_word, run)
    words = runs[:, :, 0].to(torch.int16)
    for place in range(1, per_word):
        words |= runs[:, :, place].to(torch.int16) << (bits * place)
    return words.transpose(0, 1).contiguous()


def _narrowest(scales: torch.Tensor) -> torch.Tensor:
    """Converts to 16-bit floats if that is exact, as it is for scales that were stored so."""
    for dtype in (torch.float16, torch.bfloat16):
        narrow = scales.to(dtype)
        if torch.equal(narrow.to(scales.dtype), scales):
            return narrow
    return scales
