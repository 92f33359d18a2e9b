"""From scaled logits to drawn tokens, as suits a device."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt
import torch

from headrace_common.sampling import SamplingParams

from .filters import draw, least_logit, thresholds
from .transfer import to_device

logger = logging.getLogger(__name__)

# (scaled logits [R, V] with a maximum of 0 in each row, parameters, uniform numbers [R]) to token
# ids int64 [R]
Draw = Callable[[torch.Tensor, Rows[SamplingParams], torch.Tensor], torch.Tensor]

# Elements of a row that a program looks at together, and its warps.
BLOCK, WARPS = 2048, 8


def make_draw(device: torch.device, *, deterministic: bool) -> Draw:
    """`deterministic`: no row's token depends on which others there are."""
    if device.type == "cpu":
        return draw_together
    try:
        from .triton_kernels import sampling as _  # noqa: F401  only whether there is Triton
    except ImportError as error:
        logger.warning("no Triton, sampling will be slow", extra={"reason": str(error)})
        return draw_one_by_one if deterministic else draw_together
    return draw_by_kernel


def draw_together(
    scaled: torch.Tensor, params: Rows[SamplingParams], numbers: torch.Tensor
) -> torch.Tensor:
    return draw(scaled, thresholds(scaled, params), numbers)


def draw_one_by_one(
    scaled: torch.Tensor, params: Rows[SamplingParams], numbers: torch.Tensor
) -> torch.Tensor:
    """Where sums over some rows at once would round a row's by which others there are: on CUDA
    devices."""
    return torch.cat(
        [
            draw_together(scaled[row : row + 1], [one], numbers[row : row + 1])
            for row, one in enumerate(params)
        ]
    )


def draw_by_kernel(
    scaled: torch.Tensor, params: Rows[SamplingParams], numbers: torch.Tensor
) -> torch.Tensor:
    """In one launch that waits for nothing."""
    limits = to_device(_limits(params, scaled.shape[1]), scaled.device)
    return launch_draw(scaled.contiguous(), limits, numbers)


def launch_draw(scaled: torch.Tensor, limits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """`limits` float32 [3, R], as sample_kernel takes them."""
    from .triton_kernels.sampling import sample_kernel

    rows, width = scaled.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=scaled.device)
    sample_kernel[(rows,)](
        tokens, scaled, limits, numbers, rows, width, BLOCK=BLOCK, num_warps=WARPS
    )
    return tokens


def _limits(params: Rows[SamplingParams], width: int) -> npt.NDArray[np.float32]:
    least = [least_logit(one) for one in params]
    most = [one.top_k if 0 < one.top_k < width else width for one in params]
    shares = [one.top_p for one in params]
    return np.array([least, most, shares], dtype=np.float32)
