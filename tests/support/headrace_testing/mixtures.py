"""Random mixtures of experts: with joined experts, with separate experts, and as the matrices in a
checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from headrace_engine.checkpoints.config import ClampedSwiGLU, ExpertsConfig
from headrace_engine.layers.expert_weights import ExpertWeights, GroupedWeight, MixtureParts
from headrace_engine.layers.feed_forward import (
    GatedActivation,
    GatedMLP,
    SharedExpert,
    SparseMoe,
    clamped_swiglu,
)
from headrace_engine.layers.float8_weight import Float8Weight, round_rows
from headrace_engine.layers.float8_weight import stack as stack_float8
from headrace_engine.layers.layers import Linear, PlainLinear
from headrace_engine.layers.mxfp4_weight import MXFP4Weight
from headrace_engine.layers.quantized_weight import QuantizedWeight
from headrace_engine.operators.base import TorchOps, gelu_tanh_mul

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]


@dataclass(frozen=True, slots=True)
class FloatRouter:
    """A router in float32, where two experts hardly ever have equal probabilities."""

    linear: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.float())


@dataclass(frozen=True, slots=True)
class Mixture:
    """`skewed` routes all rows to the same experts. `swiglu` adds biases, as in gpt-oss. `groups`
    above 0 gives DeepSeek-V3's routing, with half of the groups kept and no gate for a shared
    expert. `scaled` gives Llama 4's, whose weights multiply rows."""

    experts: int
    per_token: int
    hidden: int
    inner: int
    shared: int | None = None
    renormalise: bool = True
    gelu: bool = False
    skewed: bool = False
    swiglu: ClampedSwiGLU | None = None
    groups: int = 0
    scaled: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def config(self) -> ExpertsConfig:
        plain = ExpertsConfig(
            self.experts, self.per_token, self.inner, self.renormalise, self.shared, (True,),
            self.swiglu is not None, self.swiglu,
        )  # fmt: skip
        if self.scaled:
            return replace(plain, sigmoid=True, shared_gate=False, scaled_inputs=True)
        if not self.groups:
            return plain
        return replace(
            plain, sigmoid=True, correction=True, factor=2.5, shared_gate=False,
            groups=self.groups, kept_groups=max(1, self.groups // 2), group_best=2,
        )  # fmt: skip

    def rows(self, tokens: int, device: torch.device) -> torch.Tensor:
        """[T, H], all positive if skewed."""
        made = _random((tokens, self.hidden), 1.0, 1, device)
        return (made.abs() if self.skewed else made).to(device, self.dtype)

    def weights(self, device: torch.device) -> ExpertWeights:
        hidden, inner = self.hidden, self.inner
        gate_up = _random((self.experts, 2 * inner, hidden), hidden**-0.5, 2, device)
        down = _random((self.experts, hidden, inner), inner**-0.5, 3, device)
        return self.biased(
            ExpertWeights(
                GroupedWeight(gate_up.to(device, self.dtype)),
                GroupedWeight(down.to(device, self.dtype)),
            )
        )

    def biased(self, weights: ExpertWeights) -> ExpertWeights:
        """The weights with biases, if the mixture has any."""
        if self.swiglu is None:
            return weights
        device = weights.down.values.device
        upper = _random((self.experts, 2 * self.inner), 1.0, 8, device)
        lower = _random((self.experts, self.hidden), 1.0, 9, device)
        return weights.with_biases(upper.to(device, self.dtype), lower.to(device, self.dtype))

    def parts(
        self,
        device: torch.device,
        make: MakeLinear = PlainLinear,
        weights: ExpertWeights | None = None,
    ) -> MixtureParts:
        shared = None if self.shared is None else self._shared(device, self.shared, make)
        router = FloatRouter(make(self._router(device), None))
        weights = weights or self.weights(device)
        correction = _random((self.experts,), 0.5, 10, device) if self.groups else None
        return MixtureParts(router, weights, shared, self.config, self.gelu, correction)

    def part(self, device: torch.device, start: int, stop: int) -> MixtureParts:
        """The experts [start, stop) alone. The shared expert is with the first one."""
        whole, own = self.parts(device), slice(start, stop)
        gate_up, down = (
            GroupedWeight(one.values[own], bias=None if one.bias is None else one.bias[own])
            for one in (whole.weights.gate_up, whole.weights.down)
            if isinstance(one, GroupedWeight)
        )
        return replace(
            whole,
            weights=ExpertWeights(gate_up, down),
            shared=None if start else whole.shared,
            config=replace(whole.config, local_range=(start, stop)),
        )

    def one_by_one(self, device: torch.device, weights: ExpertWeights | None = None) -> SparseMoe:
        """The same mixture as `parts`, computed one expert at a time."""
        parts = self.parts(device, weights=weights)
        mlps = [self._expert(parts.weights, index) for index in range(self.experts)]
        return SparseMoe(parts.router, mlps, parts.shared, parts.config, parts.correction)

    def _router(self, device: torch.device) -> torch.Tensor:
        made = _random((self.experts, self.hidden), 2 * self.hidden**-0.5, 4, device)
        if self.skewed:
            made = torch.arange(self.experts)[:, None].expand(made.shape) / self.experts
        return made.to(device).contiguous()

    def _shared(self, device: torch.device, inner: int, make: MakeLinear) -> SharedExpert:
        gate_up = _random((2 * inner, self.hidden), self.hidden**-0.5, 5, device)
        down = _random((self.hidden, inner), inner**-0.5, 6, device)
        gate = _random((1, self.hidden), 0.3, 7, device)
        mlp = self._mlp(gate_up.to(device, self.dtype), down.to(device, self.dtype), make)
        ungated = self.groups or self.scaled
        return SharedExpert(mlp, None if ungated else make(gate.to(device, self.dtype), None))

    def _expert(self, weights: ExpertWeights, index: int) -> GatedMLP:
        gate_up, down = (
            PlainLinear(one.values[index], None if one.bias is None else one.bias[index])
            for one in (weights.gate_up, weights.down)
        )
        return GatedMLP(gate_up, down, self._activation)

    def _mlp(self, gate_up: torch.Tensor, down: torch.Tensor, make: MakeLinear) -> GatedMLP:
        return GatedMLP(make(gate_up, None), make(down, None), self._activation)

    @property
    def _activation(self) -> GatedActivation:
        if self.swiglu is not None:
            return partial(clamped_swiglu, self.swiglu)
        return gelu_tanh_mul if self.gelu else TorchOps().silu_mul


def expert_names(count: int) -> list[tuple[tuple[str, str], tuple[str]]]:
    """Names of each expert's gate and up matrices, and of its down matrix."""
    prefixes = [f"experts.{index}." for index in range(count)]
    return [
        ((f"{one}gate_proj.weight", f"{one}up_proj.weight"), (f"{one}down_proj.weight",))
        for one in prefixes
    ]


class Matrices:
    """A mixture's matrices by `expert_names`, cut to the parts that `cut` keeps. With `group` they
    are in 8-bit floats, with a scale for every `group` inputs."""

    def __init__(
        self,
        mixture: Mixture,
        device: torch.device,
        group: int | None = None,
        cut: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, whole: whole,
    ) -> None:
        self.device, self._group = device, group
        weights, self._found = mixture.weights(device), dict[str, torch.Tensor]()
        for index, (upper, lower) in enumerate(expert_names(mixture.experts)):
            gate, up = weights.gate_up.values[index].chunk(2)
            found = zip((*upper, *lower), (gate, up, weights.down.values[index]), strict=True)
            self._found |= {name: cut(name, whole) for name, whole in found}

    def stack(self, names: tuple[str, ...]) -> torch.Tensor:
        rounded = self.float8(names)
        if rounded is not None:
            return rounded.dequantize()
        return torch.cat([self._found[name] for name in names])

    def quantized(self, names: tuple[str, ...]) -> QuantizedWeight | None:
        """No matrix is in integers."""
        return None

    def mxfp4(self, names: tuple[str, ...]) -> MXFP4Weight | None:
        """No matrix is in MXFP4."""
        return None

    def float8(self, names: tuple[str, ...]) -> Float8Weight | None:
        group = self._group
        if group is None:
            return None
        return stack_float8([_rounded(self._found[name], group) for name in names])


class QuantizedMatrices(Matrices):
    """A mixture's matrices in integers of `bits` bits, with a scale and a zero point for each
    `size` inputs. If `symmetric`, all zero points are in the middle."""

    def __init__(
        self, mixture: Mixture, bits: int, size: int, symmetric: bool, device: torch.device
    ) -> None:
        super().__init__(mixture, device)
        self._bits, self._size, self._symmetric = bits, size, symmetric

    def stack(self, names: tuple[str, ...]) -> torch.Tensor:
        return self.quantized(names).dequantize()

    def quantized(self, names: tuple[str, ...]) -> QuantizedWeight:
        whole = torch.cat([self._found[name] for name in names]).float()
        groups, top = whole.view(len(whole), -1, self._size), 2**self._bits - 1
        low, high = groups.amin(-1), groups.amax(-1)
        if self._symmetric:
            scales = torch.maximum(-low, high) / (top // 2)
            zeros = torch.full_like(scales, (top + 1) // 2)
        else:
            scales = (high - low) / top
            zeros = (-low / scales).round().clamp(0, top)
        values = (groups / scales[..., None]).round() + zeros[..., None]
        numbers = values.clamp(0, top).to(torch.uint8).view(whole.shape)
        return QuantizedWeight(numbers, scales, zeros, None, self._bits)


def _rounded(whole: torch.Tensor, group: int) -> Float8Weight:
    values, scales = round_rows(whole.reshape(-1, group))
    return Float8Weight(values.view(whole.shape), scales.view(len(whole), -1), group)


def _random(
    shape: tuple[int, ...], deviation: float, seed: int, device: torch.device
) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device) * deviation
