"""Makes tensors without memory: torch's meta tensors raise if the host reads their values, and so
does a launch that needs one."""

import torch

META = torch.device("meta")


def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)
