"""Linear layers whose weights stay in 8-bit floats on a GPU.

From Ada (sm_89) on, activations are rounded too, with a scale for each row, and torch's scaled
product multiplies 8-bit floats. Older devices, and scales of groups of inputs, use a Triton kernel
that converts tiles of weights; activations keep their dtype. CPUs support neither: their weights
are dequantised to the model's dtype.
"""

import torch

from ..kernels.triton.launch import AMPERE
from .float8_weight import Float8Weight, round_rows
from .fp8_cache import ADA
from .layers import Linear

# Rows and columns of scaled products are multiples of this.
ALIGNMENT = 16


class ScaledLinear:
    """A layer with a scale for each output; both sizes are multiples of 16."""

    def __init__(
        self, weight: Float8Weight, bias: torch.Tensor | None, device: torch.device
    ) -> None:
        # The product takes its second factor column-major.
        self._weight = weight.values.contiguous().to(device).t()
        self._scales = weight.scales.t().contiguous().to(device)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self._weight.shape[1]
        rows = x.reshape(-1, x.shape[-1])
        if not len(rows):
            return x.new_empty(*x.shape[:-1], outputs)
        # On GPUs, products with a scale for each row return bfloat16 only.
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
    """Whether linear layers on this device can keep 8-bit float weights."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE


def make_float8(
    weight: Float8Weight,
    bias: torch.Tensor | None,
    device: torch.device,
    capability: tuple[int, int] | None = None,
) -> Linear | None:
    """Makes a layer on a device that supports it; None if no kernel supports its size.

    `capability` None asks the device, and stays None for CPUs.
    """
    if capability is None and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    one_scale = weight.scales.shape[1] == 1
    aligned = not any(size % ALIGNMENT for size in weight.shape)
    if one_scale and aligned and (capability is None or capability >= ADA):
        return ScaledLinear(weight, bias, device)
    if capability is None:
        return None
    from .triton_float8 import WeightOnlyFloat8Linear, takes

    return WeightOnlyFloat8Linear(weight, bias, device, capability) if takes(weight) else None
