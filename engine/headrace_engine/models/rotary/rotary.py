"""Rotary embeddings: tables of cosines and sines, one row a position.

Frequencies follow transformers' `modeling_rope_utils` for each rope type, in float32.
"""

import math
from collections.abc import Callable
from typing import Self

import torch

from ...checkpoints.rope import RopeConfig, yarn_mscale
from ..base import VisionRows

Frequencies = tuple[torch.Tensor, float]


# Tables of more positions are made by need: those of 10 million positions would take 5 GB.
WHOLE = 1 << 18
# Rows that are then added at once.
_ROWS = 1 << 16


class RotaryTable:
    """cos and sin, float32 [positions, rotated / 2], times the type's attention factor.

    `rotated` is the number of rotated elements of a head: all of head_dim except for partial
    embeddings. A table of more than WHOLE positions has only the rows that are used.

    `dynamic` (NTK) depends on a sequence's length beyond the checkpoint's context. There, each
    position uses the frequencies of the length that ends with it: transformers does the same for
    tokens generated one by one, and the result does not depend on batch, chunks or a shared prefix.

    `longrope` has two sets of factors: the long ones if the table is longer than the original
    context, else the short ones, for all positions alike.

    With M-RoPE each frequency belongs to one of a token's three positions (`axes` of RopeConfig).
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, context: int, positions: int, device: torch.device
    ) -> None:
        self._rope, self._dim = rope, rope.rotated(head_dim)
        self._context, self._positions = context, positions
        self._inverse, self._scale = _frequencies(rope, self._dim, context, positions)
        self._axes = torch.tensor(rope.axes, dtype=torch.int64, device=device)
        self.is_whole, self._made = positions <= WHOLE, 0
        if self.is_whole:
            cos, sin = self._rotations(torch.arange(positions)[:, None])
            self._cos, self._sin = cos.to(device), sin.to(device)
        else:
            self._inverse = self._inverse.to(device)
            # Memory is taken when rows are written; on other devices than CPUs none are.
            rows = positions if device.type == "cpu" else 0
            self._cos, self._sin = (torch.empty(rows, self._dim // 2) for _ in range(2))

    @classmethod
    def unrotated(cls, dim: int, positions: int, device: torch.device) -> Self:
        """A table that leaves `dim` elements of a head unchanged; it takes no memory."""
        table = cls.__new__(cls)
        table.is_whole = True
        table._cos = torch.ones(1, dim // 2, device=device).expand(positions, -1)
        table._sin = torch.zeros(1, dim // 2, device=device).expand(positions, -1)
        table._axes = torch.empty(0, dtype=torch.int64)
        return table

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of all positions, on CPUs. If the table is not whole, only the rows that were
        reserved have values."""
        return self._cos, self._sin

    def reserve(self, length: int) -> None:
        """Makes the rows of `tables` below `length`, unless the table is whole."""
        if self.is_whole or length <= self._made:
            return
        stop = min(-(-length // _ROWS) * _ROWS, self._positions)
        added = torch.arange(self._made, stop)[:, None]
        self._cos[self._made : stop], self._sin[self._made : stop] = self._rotations(added)
        self._made = stop

    def lookup(
        self, positions: torch.Tensor, vision: VisionRows | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each [T, rotated / 2], of int64 positions [T]. With M-RoPE rows in images are
        rotated by their three positions."""
        if self.is_whole:
            found = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        else:
            found = self._rotations(positions[:, None])
        if vision is not None and vision.positions is not None and len(self._axes):
            for values, part in zip(found, self._mixed(vision.positions), strict=True):
                values.index_copy_(0, vision.rows, part)
        return found

    def _mixed(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each [V, rotated / 2], of int64 positions [3, V]; M-RoPE only."""
        chosen = positions.index_select(0, self._axes).T
        if not self.is_whole:
            return self._rotations(chosen)
        return self._cos.gather(0, chosen), self._sin.gather(0, chosen)

    def _rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each [n, rotated / 2], of int64 positions [n, 1], or of one for each
        frequency."""
        places = positions.float()
        angles = places * self._inverse
        if self._rope.rope_type == "dynamic" and self._positions > self._context:
            stretched = places * _dynamic(self._rope, self._dim, self._context, places + 1)
            angles = torch.where(positions < self._context, angles, stretched)
        return angles.cos() * self._scale, angles.sin() * self._scale


def _frequencies(rope: RopeConfig, dim: int, context: int, positions: int) -> Frequencies:
    """Inverse frequencies [dim / 2] within the checkpoint's context, and the factor of cos and
    sin."""
    if rope.rope_type == "longrope":
        return _longrope(rope, dim, context, positions)
    return _TYPES[rope.rope_type](rope, dim)


def _default(rope: RopeConfig, dim: int) -> Frequencies:
    return 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)), 1.0


def _linear(rope: RopeConfig, dim: int) -> Frequencies:
    return _default(rope, dim)[0] / rope.parameters["factor"], 1.0


def _dynamic(rope: RopeConfig, dim: int, context: int, length: torch.Tensor) -> torch.Tensor:
    factor = rope.parameters["factor"]
    base = rope.theta * ((factor * length / context) - (factor - 1)) ** (dim / (dim - 2))
    powers = torch.arange(0, dim, 2, dtype=torch.float32, device=length.device) / dim
    inverse: torch.Tensor = 1.0 / (base**powers)
    return inverse


def _llama3(rope: RopeConfig, dim: int) -> Frequencies:
    inverse, _ = _default(rope, dim)
    factor = rope.parameters["factor"]
    low, high = rope.parameters["low_freq_factor"], rope.parameters["high_freq_factor"]
    context = rope.parameters["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > context / low, inverse / factor, inverse)
    smooth = (context / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    medium = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(medium, smoothed, scaled), 1.0


def _yarn(rope: RopeConfig, dim: int) -> Frequencies:
    """YaRN, https://arxiv.org/abs/2309.00071."""
    factor = rope.parameters["factor"]
    powers = rope.theta ** (torch.arange(0, dim, 2).float() / dim)
    low, high = _yarn_range(rope, dim)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    inverse = (1.0 / (factor * powers)) * (1 - keep) + (1.0 / powers) * keep
    return inverse, _yarn_factor(rope, factor)


def _yarn_range(rope: RopeConfig, dim: int) -> tuple[float, float]:
    context = rope.parameters["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return (dim * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low = dimension(rope.parameters.get("beta_fast") or 32)
    high = dimension(rope.parameters.get("beta_slow") or 1)
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_factor(rope: RopeConfig, factor: float) -> float:
    given = rope.parameters.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, all_dim = rope.parameters.get("mscale"), rope.parameters.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor, 1.0)


def _longrope(rope: RopeConfig, dim: int, context: int, positions: int) -> Frequencies:
    """LongRoPE, https://arxiv.org/abs/2402.13753."""
    original = rope.parameters["original_max_position_embeddings"]
    name = "long_factor" if positions > original else "short_factor"
    divisors = torch.tensor(rope.parameters[name], dtype=torch.float32)
    factor = rope.parameters.get("factor") or context / original
    given = rope.parameters.get("attention_factor")
    if given is None:
        given = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    return 1.0 / (divisors * powers), float(given)


_TYPES: dict[str, Callable[[RopeConfig, int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "yarn": _yarn,
    "llama3": _llama3,
}
