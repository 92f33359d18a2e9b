"""Keys and values in 8-bit floats: a cached number times its layer's scale is the value.

e4m3 has 3 bits of mantissa and a maximum of 448, e5m2 has 2 and 57344. Larger values become the
maximum; NaN stays NaN.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The first devices with instructions for e4m3.
ADA = (8, 9)
# The values of the setting, as in vLLM. None: the model's dtype.
CACHE_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "fp8": E4M3,
    "fp8_e4m3": E4M3,
    "fp8_e5m2": E5M2,
}


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype in (E4M3, E5M2)


def quantize_kv(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """x / `scale` if `dtype` is an 8-bit float, otherwise x; rounded to `dtype`."""
    if not is_fp8(dtype):
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    # Multiplies by the inverse, as the kernels do.
    return (x.float() * (1.0 / scale)).clamp(-largest, largest).to(dtype)


def dequantize_kv(x: torch.Tensor, scale: float) -> torch.Tensor:
    """The values that a cache's numbers represent, in float32."""
    return x.float() * scale if is_fp8(x.dtype) else x.float()


def raw(part: torch.Tensor) -> torch.Tensor:
    """The same memory; as bytes if it holds 8-bit floats.

    torch cannot gather or scatter 8-bit floats on every device.
    """
    return part.view(torch.uint8) if is_fp8(part.dtype) else part


@dataclass(frozen=True, slots=True)
class Storage:
    """How kernels see a tensor.

    With `as_bytes` they read its 8-bit floats as bytes. `largest` is the largest 8-bit float; 0 if
    the tensor has another dtype.
    """

    as_bytes: bool
    largest: float

    def views(self, parts: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(part.view(torch.uint8) if self.as_bytes else part for part in parts)


NOT_FP8 = Storage(as_bytes=False, largest=0.0)


def storage(dtype: torch.dtype, capability: tuple[int, int]) -> Storage:
    """The storage for Triton kernels on a device of this compute capability."""
    largest = torch.finfo(dtype).max if is_fp8(dtype) else 0.0
    return Storage(as_bytes=dtype is E4M3 and capability < ADA, largest=largest)
