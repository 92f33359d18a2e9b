"""Checks whether a model can be served such that a request's bits never depend on the rest of its
batch.

On CPUs the native kernels guarantee it if they compute the whole step. On CUDA devices Triton's
kernels do. torch's own operators round some elements depending on their position.
"""

from ..checkpoints.config import ModelConfig
from ..core.errors import ConfigError
from .registry import LoadOptions

REMEDY = "serve it without deterministic"


def check_deterministic(
    config: ModelConfig, options: LoadOptions, fused: bool, float8: bool
) -> None:
    """Raises ConfigError naming what prevents it. `fused`: steps run in native kernels; `float8`:
    weights are 8-bit floats."""
    if options.shard is not None:
        raise ConfigError(f"deterministic takes no tensor parallelism: {REMEDY}")
    if options.device.type == "cuda":
        _check_cuda(float8)
        if config.latent is not None:
            raise ConfigError(f"deterministic takes no attention to latents (MLA): {REMEDY}")
    elif not fused:
        raise ConfigError(
            "deterministic on a CPU needs a model whose whole step the native kernels compute, in "
            f"bfloat16 or float32, and this one has parts in torch: {REMEDY}"
        )


def _check_cuda(float8: bool) -> None:
    if float8:
        raise ConfigError(f"deterministic takes no weights in 8-bit floats on a GPU: {REMEDY}")
