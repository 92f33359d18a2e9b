"""Decides whether and for which sizes a loaded model's kernels are tuned.

They are tuned only if steps are captured as CUDA graphs: otherwise launches cost the host more than
any choice saves. They are never tuned in deterministic mode, where all engines must add sums in the
same order.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import triton
from triton.errors import TritonError

from ..attention.triton import TritonBackend
from ..core.attention_backend import KVSpec
from ..core.config import EngineConfig
from ..cuda_graphs.cuda_graphs import free_bytes
from ..kernels import triton as triton_kernels
from ..kernels.triton.launch import EXPERT_BOUNDS, HOPPER, LORA_BOUNDS, ROW_BOUNDS
from ..models.decoder.decoder import Decoder
from ..models.placed_model import PlacedModel
from ..operators.triton import TritonOps
from .adapters import AdapterTuning
from .attention import POOL_BYTES, AttentionShape, tune_attention
from .autotuner import BUDGET, Autotuner, CudaTimer
from .compiling import compile_together
from .experts import MANY_TOKENS, tune_experts
from .float8 import tune_float8
from .packed import tune_packed
from .products import tune_products
from .steps import STEP_BOUNDS, STEP_POOL_BYTES, can_tune_steps, tune_steps
from .table import ChoiceTable

# These are measured after single rows and attention. 8 and 16 rows use the kernels compiled for 1.
LATER_ROWS = (64, 16, 8, 32)
# The same for mixtures and for adapters.
LATER_TOKENS, ADAPTED_ROWS = (64, MANY_TOKENS, 256, 16), (64, 1, 16, 256)


def tune(placed: PlacedModel, config: EngineConfig, budget: float = BUDGET) -> None:
    """Makes the model use the fastest kernels, measured here within `budget` seconds or read from
    `tuned_config_folder`.

    Raises ConfigError for a table there that cannot be read.
    """
    table = None
    if config.tuned_config_folder is not None:
        device = torch.cuda.get_device_name(placed.device)
        table = ChoiceTable(Path(config.tuned_config_folder), device, versions())
    known = {} if table is None else table.read()
    failures = (RuntimeError, TritonError)
    prepare = partial(compile_together, failures=failures)
    tuner = Autotuner(CudaTimer(), known=known, failures=failures, budget=budget, prepare=prepare)
    with torch.inference_mode():
        tune_with(tuner, placed, config)
    torch.cuda.empty_cache()
    if table is not None and tuner.measured:
        table.write(tuner.choices)


def tune_with(tuner: Autotuner, placed: PlacedModel, config: EngineConfig) -> None:
    """Measures the most valuable first: choices that the tuner has no time for keep the default."""
    _tune_experts(tuner, placed, EXPERT_BOUNDS[0])
    _tune_products(tuner, placed, ROW_BOUNDS[0])
    model, latents = placed.model, any(shape.latent for shape in placed.model.kv_shapes)
    if isinstance(placed.attention, TritonBackend) and isinstance(model, Decoder) and not latents:
        tune_attention(tuner, placed.attention, _attention_shape(placed, model, config))
    _tune_steps(tuner, placed, config, STEP_BOUNDS[0])
    adapters = _adapters(placed, config)
    for rows in ADAPTED_ROWS:
        if adapters is not None and _is_reached(rows, LORA_BOUNDS, config.max_num_seqs):
            adapters.tune(tuner, rows)
    for tokens in LATER_TOKENS:
        if _is_reached(tokens, EXPERT_BOUNDS, config.max_num_seqs):
            _tune_experts(tuner, placed, tokens)
    for rows in LATER_ROWS:
        if _is_reached(rows, ROW_BOUNDS, config.max_num_seqs):
            _tune_products(tuner, placed, rows)
    for below, bound in pairwise(STEP_BOUNDS):
        if below < config.max_num_seqs:
            _tune_steps(tuner, placed, config, bound)


def _is_reached(bound: int, bounds: Sequence[int], most: int) -> bool:
    """Whether a number of up to `most` lies in the range of `bound` (above the bound before it), so
    that this measurement is needed. Prompts exceed the last bound."""
    below = [one for one in bounds if one < bound]
    return bound > bounds[-1] or not below or below[-1] < most


def _tune_products(tuner: Autotuner, placed: PlacedModel, rows: int) -> None:
    if isinstance(placed.ops, TritonOps):
        tune_products(tuner, placed.ops.products, rows, placed.device)
        tune_packed(tuner, placed.ops.packed, rows, _like(placed))
        tune_float8(tuner, placed.ops.float8, rows, _like(placed))


def _tune_experts(tuner: Autotuner, placed: PlacedModel, tokens: int) -> None:
    if isinstance(placed.ops, TritonOps):
        tune_experts(tuner, placed.ops.mixtures, tokens, _like(placed))


def _adapters(placed: PlacedModel, config: EngineConfig) -> AdapterTuning | None:
    shapes, ops = placed.lora_shapes, placed.ops
    if not config.enable_lora or shapes is None or not isinstance(ops, TritonOps):
        return None
    return AdapterTuning(ops, shapes, config.max_loras, config.max_lora_rank, _like(placed))


def _like(placed: PlacedModel) -> torch.Tensor:
    """An empty tensor with the dtype and device of activations."""
    return torch.empty(0, dtype=placed.dtype, device=placed.device)


def _tune_steps(tuner: Autotuner, placed: PlacedModel, config: EngineConfig, bound: int) -> None:
    if _is_hopper(placed.device) and can_tune_steps(placed):
        tune_steps(tuner, placed, config, bound, _pool_bytes(placed.device, STEP_POOL_BYTES))


def _is_hopper(device: torch.device) -> bool:
    """Whether the device supports dependent launches: Hopper and newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= HOPPER


def _attention_shape(placed: PlacedModel, model: Decoder, config: EngineConfig) -> AttentionShape:
    heads = model.heads
    spec = KVSpec(
        heads.num_kv_heads,
        heads.head_dim,
        config.block_size,
        placed.dtype,
        placed.device,
        placed.cache_dtype,
    )
    return AttentionShape(
        heads.num_heads,
        spec,
        model.layer_params,
        config.max_num_seqs,
        placed.max_model_len,
        config.max_num_batched_tokens,
        _pool_bytes(placed.device, POOL_BYTES),
    )


def _pool_bytes(device: torch.device, most: int) -> int:
    """`most`, or less if the weights leave little memory."""
    return min(most, free_bytes(device) // 4) if device.type == "cuda" else most


def versions() -> dict[str, str]:
    """The versions for which measurements hold: the compiler, cuBLAS and the kernels' sources."""
    sources = sorted(Path(triton_kernels.__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    return {
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "kernels": digest[:16],
    }
