"""What a loaded model's kernels are tuned for, and when.

Only where steps are recorded: else launches cost the host more than any choice saves. Never in
deterministic mode, whose sums must have one order on every engine.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import triton
from triton.errors import TritonError

from .. import triton_kernels
from ..attention.base import KVSpec
from ..attention.triton import TritonBackend
from ..config import EngineConfig
from ..model.cuda_graphs import free_bytes
from ..model.decoder import Decoder
from ..model.triton_ops import TritonOps
from ..placement import PlacedModel
from ..triton_kernels.launch import EXPERT_BOUNDS, HOPPER, LORA_BOUNDS, ROW_BOUNDS
from .adapters import AdapterTuning
from .attention import POOL_BYTES, AttentionShape, tune_attention
from .autotuner import Autotuner, CudaTimer
from .compiling import compile_together
from .experts import MANY_TOKENS, tune_experts
from .float8 import tune_float8
from .levels import tune_levels
from .products import tune_products
from .steps import STEP_BOUNDS, STEP_POOL_BYTES, can_depend, tune_steps
from .table import ChoiceTable

# Behind single rows and attention. 8 and 16 rows take the kernels that 1 has compiled.
LATER_ROWS = (64, 16, 8, 32)
# Of mixtures and of adapters, likewise.
LATER_TOKENS, ADAPTED_ROWS = (64, MANY_TOKENS, 256, 16), (64, 1, 16, 256)


def tune(placed: PlacedModel, config: EngineConfig) -> None:
    """Has the model use what is fastest, measured here or in `tuned_config_folder`.

    Raises ConfigError for a table there that cannot be read.
    """
    table = None
    if config.tuned_config_folder is not None:
        device = torch.cuda.get_device_name(placed.device)
        table = ChoiceTable(Path(config.tuned_config_folder), device, versions())
    known = {} if table is None else table.read()
    failures = (RuntimeError, TritonError)
    prepare = partial(compile_together, failures=failures)
    tuner = Autotuner(CudaTimer(), known=known, failures=failures, prepare=prepare)
    with torch.inference_mode():
        tune_with(tuner, placed, config)
    torch.cuda.empty_cache()
    if table is not None and tuner.measured:
        table.write(tuner.choices)


def tune_with(tuner: Autotuner, placed: PlacedModel, config: EngineConfig) -> None:
    """The most valuable first: what comes behind the tuner's time keeps its default."""
    products, experts = _products(placed), _experts(placed)
    experts(tuner, EXPERT_BOUNDS[0])
    products(tuner, ROW_BOUNDS[0])
    if isinstance(placed.attention, TritonBackend) and isinstance(placed.model, Decoder):
        shape = _attention_shape(placed, placed.model, config)
        tune_attention(tuner, placed.attention, shape)
    steps = _steps(placed, config)
    steps(tuner, STEP_BOUNDS[0])
    adapters = _adapters(placed, config)
    for rows in ADAPTED_ROWS:
        if adapters is not None and _is_reached(rows, LORA_BOUNDS, config.max_num_seqs):
            adapters.tune(tuner, rows)
    for tokens in LATER_TOKENS:
        if _is_reached(tokens, EXPERT_BOUNDS, config.max_num_seqs):
            experts(tuner, tokens)
    for rows in LATER_ROWS:
        if _is_reached(rows, ROW_BOUNDS, config.max_num_seqs):
            products(tuner, rows)
    for below, bound in pairwise(STEP_BOUNDS):
        if below < config.max_num_seqs:
            steps(tuner, bound)


def _is_reached(bound: int, bounds: Sequence[int], most: int) -> bool:
    """Whether there are numbers up to `bound` that no bound below covers, with `most` the largest.
    Prompts make more than the last bound."""
    below = [one for one in bounds if one < bound]
    return bound > bounds[-1] or not below or below[-1] < most


def _products(placed: PlacedModel) -> Callable[[Autotuner, int], None]:
    def run(tuner: Autotuner, rows: int) -> None:
        if isinstance(placed.ops, TritonOps):
            tune_products(tuner, placed.ops.products, rows, placed.device)
            tune_levels(tuner, placed.ops.levels, rows, _like(placed))
            tune_float8(tuner, placed.ops.float8, rows, _like(placed))

    return run


def _experts(placed: PlacedModel) -> Callable[[Autotuner, int], None]:
    def run(tuner: Autotuner, tokens: int) -> None:
        if isinstance(placed.ops, TritonOps):
            tune_experts(tuner, placed.ops.mixtures, tokens, _like(placed))

    return run


def _adapters(placed: PlacedModel, config: EngineConfig) -> AdapterTuning | None:
    shapes, ops = placed.lora_shapes, placed.ops
    if not config.enable_lora or shapes is None or not isinstance(ops, TritonOps):
        return None
    return AdapterTuning(ops, shapes, config.max_loras, config.max_lora_rank, _like(placed))


def _like(placed: PlacedModel) -> torch.Tensor:
    """What rows of activations are like."""
    return torch.empty(0, dtype=placed.dtype, device=placed.device)


def _steps(placed: PlacedModel, config: EngineConfig) -> Callable[[Autotuner, int], None]:
    def run(tuner: Autotuner, bound: int) -> None:
        if _is_hopper(placed.device) and can_depend(placed):
            tune_steps(tuner, placed, config, bound, _pool_bytes(placed.device, STEP_POOL_BYTES))

    return run


def _is_hopper(device: torch.device) -> bool:
    """Whether kernels can be launched before their turn: on Hopper and newer."""
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
    """Less than `most` where the weights leave little."""
    return min(most, free_bytes(device) // 4) if device.type == "cuda" else most


def versions() -> dict[str, str]:
    """What a measurement holds for: the compiler, cuBLAS and the kernels' sources."""
    sources = sorted(Path(triton_kernels.__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    return {
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "kernels": digest[:16],
    }
