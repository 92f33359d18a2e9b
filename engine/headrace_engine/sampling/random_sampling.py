"""Samples tokens from scaled logits, with an implementation for each kind of device."""

import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace_common.sampling.params import SamplingParams

from ..device.transfer import to_device
from .top_k_top_p import least_logit, sample_tokens, thresholds

logger = logging.getLogger(__name__)

# (scaled logits [R, V] with a maximum of 0 in each row, parameters, uniform numbers [R]) to token
# ids int64 [R]
RandomSampler = Callable[[torch.Tensor, Sequence[SamplingParams], torch.Tensor], torch.Tensor]

# Elements of a row that a Triton program reads at once, and its warps.
BLOCK, WARPS = 2048, 8


def make_random_sampler(device: torch.device, *, deterministic: bool) -> RandomSampler:
    """The implementation for a device. `deterministic`: a row's token depends on no other row."""
    if device.type == "cpu":
        return sample_together
    try:
        from ..kernels.triton import sampling as _  # noqa: F401  only whether there is Triton
    except ImportError as error:
        logger.warning("no Triton, sampling will be slow", extra={"reason": str(error)})
        return sample_row_by_row if deterministic else sample_together
    return sample_by_kernel


def sample_together(
    scaled: torch.Tensor, params: Sequence[SamplingParams], numbers: torch.Tensor
) -> torch.Tensor:
    return sample_tokens(scaled, thresholds(scaled, params), numbers)


def sample_row_by_row(
    scaled: torch.Tensor, params: Sequence[SamplingParams], numbers: torch.Tensor
) -> torch.Tensor:
    """Samples row by row: on CUDA devices the rounding of a row's sum depends on the batch."""
    return torch.cat(
        [
            sample_together(scaled[row : row + 1], [one], numbers[row : row + 1])
            for row, one in enumerate(params)
        ]
    )


def sample_by_kernel(
    scaled: torch.Tensor, params: Sequence[SamplingParams], numbers: torch.Tensor
) -> torch.Tensor:
    """Samples all rows in one launch, without waiting for the device."""
    limits = to_device(_limits(params, scaled.shape[1]), scaled.device)
    return launch_sample_kernel(scaled.contiguous(), limits, numbers)


def launch_sample_kernel(
    scaled: torch.Tensor, limits: torch.Tensor, numbers: torch.Tensor
) -> torch.Tensor:
    """`limits` float32 [3, R], as sample_kernel takes them."""
    from ..kernels.triton.sampling import sample_kernel

    rows, width = scaled.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=scaled.device)
    sample_kernel[(rows,)](
        tokens, scaled, limits, numbers, rows, width, BLOCK=BLOCK, num_warps=WARPS
    )
    return tokens


def _limits(params: Sequence[SamplingParams], width: int) -> npt.NDArray[np.float32]:
    least = [least_logit(one) for one in params]
    most = [one.top_k if 0 < one.top_k < width else width for one in params]
    shares = [one.top_p for one in params]
    return np.array([least, most, shares], dtype=np.float32)
