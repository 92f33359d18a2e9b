"""Linear layers whose weights stay in 8-bit floats on a GPU.

From Ada (sm_89) on, activations are rounded too, a scale for each row, and torch's scaled product
multiplies 8-bit floats. Else, and for scales of groups of inputs, tiles of weights are widened in
a Triton kernel, and activations stay as they are. CPUs have neither: their weights are rounded, and
computed with in the model's dtype.
"""

import torch

from ..attention.fp8 import ADA
from ..triton_kernels.launch import AMPERE
from .layers import Linear
from .quantization.float8_weight import Float8Weight, round_rows

# Rows and columns of scaled products are multiples of it.
ALIGNMENT = 16


class ScaledLinear:
    """Weights with a scale for each output, both sizes multiples of 16."""

    def __init__(
        self, weight: Float8Weight, bias: torch.Tensor | None, device: torch.device
    ) -> None:
        # Column-major, as the product takes its second factor.
        self._weight = weight.values.contiguous().to(device).t()
        self._scales = weight.scales.t().contiguous().to(device)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self._weight.shape[1]
        rows = x.reshape(-1, x.shape[-1])
        if not len(rows):
            return x.new_empty(*x.shape[:-1], outputs)
        # Products with a scale for each row come in bfloat16 only, on GPUs.
        made = torch.bfloat16 if x.device.type == "cuda" else x.dtype
        values, scales = self._round(rows)
        product = torch._scaled_mm(
            values, self._weight, scale_a=scales, scale_b=self._scales, out_dtype=made
        ).to(x.dtype)
        if self._bias is not None:
            product += self._bias
        return product.view(*x.shape[:-1], outputs)

    def _round(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if rows.device.type != "cuda":
            return round_rows(rows)
        from .triton_float8 import round_rows as round_on_device

        return round_on_device(rows)


def supports_float8(device: torch.device) -> bool:
    """Whether linear layers can keep such weights there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE


def make_float8(
    weight: Float8Weight,
    bias: torch.Tensor | None,
    device: torch.device,
    capability: tuple[int, int] | None = None,
) -> Linear | None:
    """A layer on a device that supports it; None for sizes that neither way takes.

    `capability` None asks the device, and is left at None for CPUs.
    """
    if capability is None and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    one_scale = weight.scales.shape[1] == 1
    aligned = not any(size % ALIGNMENT for size in weight.shape)
    if one_scale and aligned and (capability is None or capability >= ADA):
        return ScaledLinear(weight, bias, device)
    if capability is None:
        return None
    from .triton_float8 import WidenedLinear, takes

    return WidenedLinear(weight, bias, device, capability) if takes(weight) else None
