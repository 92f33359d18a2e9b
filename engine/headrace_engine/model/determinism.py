"""Whether a model can be served so that a request's bits never depend on what else is in its batch.

On CPUs the native kernels are made so, and a step that is theirs altogether is deterministic. On
CUDA devices Triton's are. torch's own operators round some elements by where they stand.
"""

from ..errors import ConfigError
from .config import ModelConfig
from .registry import Placement

REMEDY = "serve it without deterministic"


def check_deterministic(
    config: ModelConfig, placement: Placement, fused: bool, float8: bool
) -> None:
    """Raises ConfigError naming what stands against it. `fused`: steps run in native kernels;
    `float8`: weights are 8-bit floats."""
    if placement.shard is not None:
        raise ConfigError(f"deterministic takes no tensor parallelism: {REMEDY}")
    if placement.device.type == "cuda":
        _check_cuda(float8)
    elif not fused:
        raise ConfigError(
            "deterministic on a CPU needs a model whose whole step the native kernels compute, in "
            f"bfloat16 or float32, and this one has parts in torch: {REMEDY}"
        )


def _check_cuda(float8: bool) -> None:
    if float8:
        raise ConfigError(f"deterministic takes no weights in 8-bit floats on a GPU: {REMEDY}")
