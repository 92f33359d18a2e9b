"""Whole numbers of 4 or 8 bits as the Triton kernels read them (triton_kernels/levels.py).

Groups of inputs become runs of one length, whatever order a checkpoint has them in: where they are
not so, inputs are taken in another order, with fillers between that count nothing.
"""

from dataclasses import dataclass, replace

import torch

from ..triton_kernels.levels_launch import E2M1, READ
from .quantization.mxfp4_weight import MXFP4Weight
from .quantization.weight import QuantizedWeight

WORD_BITS = 16
# Inputs of a run: a tile of words is so wide. Tensor cores take no less than 16.
RUNS = (64, 32, 16)
# More inputs, by fillers, that a longer run may cost.
MORE = 1.1


class _Levels:
    """What kernels are given as zero points: where there are none they do not look."""

    __slots__ = ()
    scales: torch.Tensor
    zeros: torch.Tensor | None
    zero: int

    @property
    def kernel_zero(self) -> int:
        """What the kernels are compiled for: one zero point for all, or what else there is."""
        return self.zero if self.zeros is None else READ

    @property
    def zero_points(self) -> torch.Tensor:
        return self.scales if self.zeros is None else self.zeros


@dataclass(frozen=True, slots=True)
class PackedLevels(_Levels):
    """weight[o, i] = (level - zero point) * scale, for inputs in the order of `order`.

    words   int16 [steps, out, run]: in each 16 / bits numbers, the first in the lowest bits, of
            runs of `run` inputs that follow each other
    scales  [groups, out], groups of `group` inputs; with `group` 0 there is one
    zeros   uint8 [groups, out], or None where all are `zero`; numbers whose `zero` is E2M1 are
            4-bit floats
    order   int64 [steps * run * 16 / bits], or None for inputs as they are. Fillers are input 0.
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
        """With fillers."""
        return self.words.shape[-3] * self.words.shape[-1] * (WORD_BITS // self.bits)

    @property
    def num_bytes(self) -> int:
        """Of one matrix, all that a product reads."""
        parts = [self.words, self.scales, *([] if self.zeros is None else [self.zeros])]
        return sum(part.numel() * part.element_size() for part in parts)


def pack_levels(weight: QuantizedWeight, device: torch.device) -> PackedLevels:
    """Fewer than 4 bits are kept in 4."""
    bits = 4 if weight.bits <= 4 else 8
    found = _in_runs(weight, WORD_BITS // bits)
    zero = int(found.zeros[0, 0])
    alike = bool((found.zeros == zero).all())
    return PackedLevels(
        words=_words(found.levels.to(device), bits, found.run),
        scales=_narrowest(found.scales.T.contiguous()).to(device),
        zeros=None if alike else found.zeros.T.to(torch.uint8).contiguous().to(device),
        zero=zero,
        group=found.group,
        bits=bits,
        order=None if found.order is None else found.order.to(device),
    )


def pack_mxfp4(weight: MXFP4Weight, device: torch.device) -> PackedLevels:
    """Its codes in the place of numbers."""
    return replace(pack_levels(weight.codes(), device), zero=E2M1)


@dataclass(frozen=True, slots=True)
class GroupedLevels(_Levels):
    """PackedLevels of E matrices of one shape: words [E, steps, out, run], scales and zeros
    [E, groups, out], bias [E, out]. `inputs` are in their order; fillers are behind the last."""

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


class LevelsStack:
    """Fills GroupedLevels, a matrix after the other."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._words: torch.Tensor | None = None
        self._inputs: int | None = None
        self._taken: list[PackedLevels] = []

    def take(self, packed: PackedLevels) -> bool:
        """Whether the matrix is of the kind of those before it, and is in its place now."""
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

    def made(self) -> GroupedLevels:
        assert self._words is not None and self._inputs is not None, "some were taken"
        first = self._taken[0]
        alike = all(one.zeros is None and one.zero == first.zero for one in self._taken)
        kinds = {one.scales.dtype for one in self._taken}
        dtype = kinds.pop() if len(kinds) == 1 else torch.float32
        return GroupedLevels(
            words=self._words,
            scales=torch.stack([one.scales.to(dtype) for one in self._taken]),
            zeros=None if alike else torch.stack([_zeros(one) for one in self._taken]),
            zero=first.zero,
            group=first.group,
            bits=first.bits,
            inputs=self._inputs,
        )


def _inputs_in_order(packed: PackedLevels) -> int | None:
    """How many there are, or None where they are in another order."""
    order = packed.order
    if order is None:
        return packed.inputs
    count = int(order.max()) + 1
    usual = torch.arange(count, device=order.device)
    return count if torch.equal(order[:count], usual) else None


def _are_floats(packed: PackedLevels) -> bool:
    return packed.zero == E2M1


def _zeros(packed: PackedLevels) -> torch.Tensor:
    if packed.zeros is not None:
        return packed.zeros
    return torch.full(
        packed.scales.shape, packed.zero, dtype=torch.uint8, device=packed.words.device
    )


@dataclass(frozen=True, slots=True)
class _Runs:
    levels: torch.Tensor
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
            return _Runs(weight.levels, weight.scales, weight.zeros, group, run, None)
    return _filled(weight, per_word)


def _filled(weight: QuantizedWeight, per_word: int) -> _Runs:
    """Inputs by group, each with fillers up to one length, and then up to whole steps. A filler's
    level is the zero point, and beyond the last group its scale is 0."""
    count = weight.scales.shape[1]
    groups = weight.groups
    if groups is None:
        groups = torch.arange(weight.shape[1]) // (weight.shape[1] // count)
    sizes = torch.bincount(groups, minlength=count)
    run, group = _lengths(int(sizes.max()), count, per_word)
    length = -(-count * group // (run * per_word)) * run * per_word
    total = -(-length // group)
    starts = sizes.cumsum(0) - sizes
    by_group = groups.argsort(stable=True)
    owner = groups[by_group]
    places = owner * group + torch.arange(len(groups)) - starts[owner]
    order = torch.zeros(length, dtype=torch.int64).index_copy_(0, places, by_group)
    scales, zeros = (weight.scales.new_zeros(len(weight.levels), total) for _ in range(2))
    scales[:, :count], zeros[:, :count] = weight.scales, weight.zeros
    levels = zeros.to(torch.uint8).repeat_interleave(group, dim=1)[:, :length]
    levels[:, places] = weight.levels[:, by_group]
    return _Runs(levels, scales, zeros, 0 if count == 1 and total == 1 else group, run, order)


def _lengths(largest: int, count: int, per_word: int) -> tuple[int, int]:
    """(run, group) for groups of up to `largest` inputs: the longest run that costs little."""
    found = [(run, -(-largest // run) * run) for run in RUNS]

    def inputs(run: int, group: int) -> int:
        return -(-count * group // (run * per_word)) * run * per_word

    fewest = min(inputs(*one) for one in found)
    return next(one for one in found if inputs(*one) <= MORE * fewest)


def _words(levels: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """uint8 [out, in] to int16 [steps, out, run]."""
    per_word = WORD_BITS // bits
    runs = levels.view(len(levels), -1, per_word, run)
    words = runs[:, :, 0].to(torch.int16)
    for place in range(1, per_word):
        words |= runs[:, :, place].to(torch.int16) << (bits * place)
    return words.transpose(0, 1).contiguous()


def _narrowest(scales: torch.Tensor) -> torch.Tensor:
    """As 16-bit floats where those hold the same numbers, as they do for what was stored so."""
    for dtype in (torch.float16, torch.bfloat16):
        narrow = scales.to(dtype)
        if torch.equal(narrow.to(scales.dtype), scales):
            return narrow
    return scales
