"""Fixes rotary frequencies that transformers would otherwise choose for every forward pass.

`dynamic` and `longrope` embeddings choose frequencies by the longest sequence of a batch, so that
one request would change another's tokens. Here they depend only on the engine's context.
"""

import logging
from typing import Any

import torch

from ...core.errors import ConfigError

logger = logging.getLogger(__name__)


def lock_rope(model: torch.nn.Module, max_model_len: int) -> None:
    """Changes the model's rotary modules in place.

    `dynamic`: only contexts within the checkpoint's own are served, where nothing is rescaled.
    `longrope`: the short factors if the whole context fits the original one, else the long factors
    for every request. Raises ConfigError for a context that cannot be served.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        if any(isinstance(name, str) and "dynamic" in name for name in kinds):
            _check_dynamic(module, max_model_len)
        if "longrope" in kinds:
            if isinstance(kind, dict):
                raise ConfigError("longrope for some layer types only is not supported")
            _lock_longrope(module, max_model_len)


def _check_dynamic(module: Any, max_model_len: int) -> None:
    if max_model_len > module.original_max_seq_len:
        raise ConfigError(
            f"max_model_len {max_model_len} is above {module.original_max_seq_len}, where its "
            "dynamic rotary embedding would change with the batch: set at most that"
        )


def _lock_longrope(module: Any, max_model_len: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = module.config
    original = config.rope_parameters["original_max_position_embeddings"]
    if max_model_len > original:
        long, _ = ROPE_INIT_FUNCTIONS["longrope"](
            config, module.inv_freq.device, seq_len=original + 1
        )
        module.inv_freq.copy_(long)
        logger.warning(
            "long rotary factors are used for every request",
            extra={"max_model_len": max_model_len, "original_context": original},
        )
    module.rope_type = "default"
