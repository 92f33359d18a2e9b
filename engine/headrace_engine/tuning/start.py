"""What a loaded model's kernels are tuned for, and when.

Only where steps are recorded: else launches cost the host more than any choice saves. Never in
deterministic mode, whose sums must have one order on every engine.
"""

import hashlib
from collections.abc import Callable
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
from ..triton_kernels.launch import ROW_BOUNDS
from .attention import POOL_BYTES, AttentionShape, tune_attention
from .autotuner import Autotuner, CudaTimer
from .products import tune_products
from .table import ChoiceTable

# Behind single rows and attention. 8 and 16 rows take the kernels that 1 has compiled.
LATER_ROWS = (64, 16, 8, 32)


def tune(placed: PlacedModel, config: EngineConfig) -> None:
    """Has the model use what is fastest, measured here or in `tuned_config_folder`.

    Raises ConfigError for a table there that cannot be read.
    """
    table = None
    if config.tuned_config_folder is not None:
        device = torch.cuda.get_device_name(placed.device)
        table = ChoiceTable(Path(config.tuned_config_folder), device, versions())
    known = {} if table is None else table.read()
    tuner = Autotuner(CudaTimer(), known=known, failures=(RuntimeError, TritonError))
    with torch.inference_mode():
        tune_with(tuner, placed, config)
    torch.cuda.empty_cache()
    if table is not None and tuner.measured:
        table.write(tuner.choices)


def tune_with(tuner: Autotuner, placed: PlacedModel, config: EngineConfig) -> None:
    """The most valuable first: what comes behind the tuner's time keeps its default."""
    products = _products(placed)
    products(tuner, ROW_BOUNDS[0])
    if isinstance(placed.attention, TritonBackend) and isinstance(placed.model, Decoder):
        shape = _attention_shape(placed, placed.model, config)
        tune_attention(tuner, placed.attention, shape)
    for rows in LATER_ROWS:
        if max(bound for bound in ROW_BOUNDS if bound < rows) < config.max_num_seqs:
            products(tuner, rows)


def _products(placed: PlacedModel) -> Callable[[Autotuner, int], None]:
    def run(tuner: Autotuner, rows: int) -> None:
        if isinstance(placed.ops, TritonOps):
            tune_products(tuner, placed.ops.products, rows, placed.device)

    return run


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
        _pool_bytes(placed.device),
    )


def _pool_bytes(device: torch.device) -> int:
    """Less where the weights leave little."""
    if device.type != "cuda":
        return POOL_BYTES
    return min(POOL_BYTES, free_bytes(device) // 4)


def versions() -> dict[str, str]:
    """What a measurement holds for: the compiler, cuBLAS and the kernels' sources."""
    sources = sorted(Path(triton_kernels.__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    return {
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "kernels": digest[:16],
    }
