"""Loads a checkpoint onto its device, with the attention backend and operators that compute it.

Decides where and how to compute; runs nothing.
"""

import logging
from collections.abc import Callable, Sequence

import torch

from .. import attention
from ..checkpoints.architectures import attends_in_chunks, keeps_latents
from ..checkpoints.checkpoint import Checkpoint, load_checkpoint
from ..core.config import EngineConfig
from ..core.errors import ConfigError
from ..core.kv_cache_groups import KVLayout
from ..core.pooler_config import PoolerConfig
from ..core.start_phases import OnPhase, ignore_phase
from ..layers.fp8_cache import CACHE_DTYPES
from ..lora.batch import LoRAOps
from ..lora.shapes import AdaptableModel, LayerShapes
from ..models.base import CausalModel, KVShape, RecurrentModel, state_layout
from ..models.draft_heads.base import HeadOptions
from ..models.encoder.encoder_families import encoder_family
from ..models.encoder.pooler_config import (
    check_overrides,
    is_embedding_model,
    read_pooler_config,
)
from ..models.hidden_states import causal
from ..models.parallel import Shard
from ..models.placed_model import PlacedModel
from ..models.registry import LoadedModel, LoadOptions, load_model
from ..models.weights.weights import stored_dtype
from ..operators.base import Ops, TorchOps
from ..operators.cpu import make_ops
from .towers import pick_tower

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def place_model(
    config: EngineConfig, shard: Shard | None = None, on_phase: OnPhase = ignore_phase
) -> PlacedModel:
    """Loads the model, or the part that `shard` names, onto this rank's device.

    Raises CheckpointError or ConfigError naming what cannot be loaded or served.
    """
    on_phase("device")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    checkpoint = load_checkpoint(config.model, config.revision)
    pooler_config = _pooler_config(config, checkpoint)
    if pooler_config is not None and not pooler_config.bidirectional:
        checkpoint = causal(checkpoint)
    device = pick_device(config.device)
    if shard is not None and device.type == "cuda":
        device = torch.device("cuda", shard.rank % config.ranks_per_node)
        torch.cuda.set_device(device)
    dtype = pick_dtype(config.dtype, checkpoint, device)
    dtype_name = str(dtype).removeprefix("torch.")
    logger.info("loading weights", extra={"dtype": dtype_name, "device": str(device)})
    wanted, deterministic = config.attention_backend, config.deterministic
    stored = pick_cache_dtype(config.kv_cache_dtype)
    native, name = config.model_implementation != "transformers", checkpoint.architecture
    backend = attention.select(
        wanted,
        device,
        dtype,
        config.block_size,
        deterministic,
        stored,
        native and keeps_latents(name),
        native and attends_in_chunks(name),
    )
    # The reference backend uses plain torch everywhere; the others use native kernels.
    ops = TorchOps() if backend.name == "reference" else make_ops(device, deterministic)
    _check_adapters(config, ops)
    options = LoadOptions(
        device,
        dtype,
        backend,
        ops,
        config.max_model_len,
        config.quantization,
        hidden_states=pooler_config is not None,
        shard=shard,
        deterministic=deterministic,
        load_format=config.load_format,
        cache_dtype=stored,
        draft_head=HeadOptions.of(config),
        enable_lora=config.enable_lora,
    )
    on_phase("weights")
    with torch.inference_mode():
        loaded = load_model(config, checkpoint, options)
        tower = None
        if shard is None or shard.rank == 0:
            tower = pick_tower(config, checkpoint, loaded.model, dtype, device)

    def block_bytes(shape: KVShape) -> int:
        return backend.block_bytes(shape.spec(config.block_size, dtype, device, stored))

    placed = PlacedModel(
        model=loaded.model,
        attention=backend,
        ops=ops,
        device=device,
        dtype=dtype,
        eos_token_ids=frozenset(checkpoint.eos_token_ids),
        max_model_len=loaded.max_model_len,
        layout=_layout(config, loaded, block_bytes),
        pooler_config=pooler_config,
        cache_dtype=stored,
        lora_shapes=_lora_shapes(config, loaded.model, name),
        draft_head=loaded.draft_head,
        tower=tower,
    )
    if _is_tuned(config, placed):
        on_phase("kernels")
        from ..autotune.start import tune  # needs Triton

        tune(placed, config)
    return placed


def _layout(
    config: EngineConfig, loaded: LoadedModel, block_bytes: Callable[[KVShape], int]
) -> KVLayout:
    """The layout: layers that keep different positions get separate blocks, if all blocks of these
    layers have the same size or parts of it. A draft head's layers follow the model's and keep all
    positions."""
    shapes = loaded.model.kv_shapes
    windows = loaded.windows or (None,) * len(shapes)
    if loaded.draft_head is not None:
        shapes = (*shapes, *loaded.draft_head.kv_shapes)
        windows = (*windows, *(None for _ in loaded.draft_head.kv_shapes))
    if isinstance(loaded.model, RecurrentModel):
        return _with_state(config, loaded.model, windows, block_bytes)
    hybrid = KVLayout.of(windows, chunked=loaded.chunked)
    if hybrid.groups.count == 1:
        return hybrid
    single = KVLayout.of(windows, hybrid=False, chunked=loaded.chunked)
    if config.disable_hybrid_kv_cache_manager:
        logger.info("layers share block tables: those with a window keep all KV, too")
        return single
    if len(set(shapes)) == 1:
        return hybrid
    return hybrid.with_sizes([block_bytes(shape) for shape in shapes]) or single


def _with_state(
    config: EngineConfig,
    model: RecurrentModel,
    windows: Sequence[int | None],
    block_bytes: Callable[[KVShape], int],
) -> KVLayout:
    """The layout with one block table for all layers with KV, and blocks of the same pool for the
    states."""
    if config.swap_space:
        raise ConfigError(
            f"swap_space is {config.swap_space}, but models with recurrent layers are not swapped: "
            "leave it out, and preempted requests are computed again"
        )
    shapes = model.kv_shapes
    state = state_layout(model, block_bytes(shapes[0]))
    return KVLayout.of(windows, hybrid=False).with_state(state.blocks)


def _is_tuned(config: EngineConfig, placed: PlacedModel) -> bool:
    wanted = config.enable_autotuner and not config.enforce_eager and not config.deterministic
    return wanted and placed.device.type == "cuda" and not isinstance(placed.ops, TorchOps)


def _check_adapters(config: EngineConfig, ops: Ops) -> None:
    if config.enable_lora and config.deterministic and not isinstance(ops, LoRAOps):
        raise ConfigError(
            "enable_lora and deterministic go together with Triton's kernels on GPUs only: leave "
            "one out"
        )


def _lora_shapes(
    config: EngineConfig, model: CausalModel, architecture: str
) -> tuple[LayerShapes, ...] | None:
    if isinstance(model, AdaptableModel):
        if config.enable_lora and not model.lora_shapes:
            raise ConfigError(
                f"enable_lora does not support {architecture}, whose checkpoints number two layers "
                "as one: leave it out"
            )
        return model.lora_shapes
    if config.enable_lora:
        raise ConfigError(
            "enable_lora needs the native implementation of a model that makes text: see "
            "model_implementation and docs/lora.md"
        )
    return None


def _pooler_config(config: EngineConfig, checkpoint: Checkpoint) -> PoolerConfig | None:
    check_overrides(config.pooler_config)
    embeds = config.task == "embed"
    if config.task == "auto":
        embeds = is_embedding_model(checkpoint)
    if not embeds:
        _check_writes(checkpoint)
        return None
    found = read_pooler_config(checkpoint, config.pooler_config)
    if found.bidirectional and config.swap_space:
        raise ConfigError(
            f"swap_space is {config.swap_space}, but {checkpoint.architecture} keeps no KV that "
            "could be swapped: leave it out"
        )
    if found.bidirectional and config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype}, but {checkpoint.architecture} keeps no "
            "KV: leave it out"
        )
    return found


def _check_writes(checkpoint: Checkpoint) -> None:
    if checkpoint.token_vector_size is not None:
        raise ConfigError(
            f"{checkpoint.folder}: {checkpoint.architecture} makes a vector for each token and "
            "writes no text: set task embed"
        )
    if encoder_family(checkpoint) is not None:
        raise ConfigError(
            f"{checkpoint.folder}: {checkpoint.architecture} is an encoder, which writes no text: "
            "set task embed, if it was trained to embed"
        )


def pick_device(name: str) -> torch.device:
    """The device that the setting names; `auto` is the first GPU, or the CPU if there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known to torch: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, not {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device {name} was asked for, but torch finds no CUDA device: set device cpu, or make "
            "a GPU visible to this process"
        )
    return device


def pick_dtype(name: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """The dtype that the setting names; `auto` is the checkpoint's, by config.json or by its
    tensors.

    CPU kernels have no float16: there, such a checkpoint is computed in bfloat16.
    """
    if name != "auto":
        return _named_dtype(name)
    stated = checkpoint.dtype_name
    found = stored_dtype(checkpoint.folder) if stated is None else _named_dtype(stated)
    if found is torch.float16 and device.type == "cpu":
        logger.info("bfloat16 is used in place of float16, which CPUs compute slowly")
        return torch.bfloat16
    return torch.float32 if found is torch.float64 else found


def pick_cache_dtype(name: str) -> torch.dtype | None:
    """The dtype of stored KV; None: the model's dtype."""
    if name not in CACHE_DTYPES:
        raise ConfigError(f"kv_cache_dtype must be one of {', '.join(CACHE_DTYPES)}, not {name!r}")
    return CACHE_DTYPES[name]


def _named_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPES)}, not {name!r}")
    return DTYPES[name]
