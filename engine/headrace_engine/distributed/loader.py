"""Loads a model onto one device, or onto several with a rank for each.

Refuses what cannot be divided before anything is started.
"""

import os
from dataclasses import replace

import torch

from ..checkpoints.architectures import RECURRENT
from ..checkpoints.checkpoint import load_checkpoint
from ..checkpoints.config import ModelConfig
from ..core.config import EngineConfig
from ..core.errors import ConfigError
from ..core.start_phases import OnPhase, ignore_phase
from ..model_loader.loader import pick_device, place_model
from ..models.hidden_states import causal
from ..models.hybrid.hybrid import read_family
from ..models.parallel import Shard, check_divisible
from ..models.placed_model import PlacedModel
from ..models.registry import NATIVE
from .model import RankZeroHead, RankZeroModel
from .process import Launcher, RankProcess
from .rank_processes import RankProcesses


def load_model(
    config: EngineConfig, launch: Launcher = RankProcess, on_phase: OnPhase = ignore_phase
) -> PlacedModel:
    """Loads the model, with ranks if there are several devices. Raises CheckpointError, ConfigError
    or RankFailed."""
    on_phase("device")
    size = config.tensor_parallel_size
    if config.node_rank:
        raise ConfigError(
            f"node_rank {config.node_rank} has no engine, only ranks: start it as `headrace engine`"
        )
    if size == 1:
        return place_model(_without_hybrid_cache(config), on_phase=on_phase)
    config, device = divided(config)
    _check_model(config)
    peers = RankProcesses(config, device, launch, on_phase)
    try:
        shard = Shard(0, size, peers.group, config.enable_expert_parallel)
        placed = place_model(config, shard, on_phase)
        peers.connect()
    except BaseException as error:
        peers.fail(error)
        raise
    model = RankZeroModel(placed.model, peers, placed.layout)
    head = placed.draft_head
    shared = None if head is None else RankZeroHead(head, peers)
    return replace(placed, model=model, peers=peers, draft_head=shared)


def divided(config: EngineConfig) -> tuple[EngineConfig, str]:
    """The configuration of this node's ranks, and their device type. Raises ConfigError."""
    device = pick_device(config.device)
    _check_devices(config, device)
    threads = config.threads or _threads(config.ranks_per_node, device)
    return replace(_without_hybrid_cache(config), threads=threads), device.type


def _without_hybrid_cache(config: EngineConfig) -> EngineConfig:
    """All layers keep all positions if blocks are swapped, or a draft's KV shares the blocks."""
    if config.swap_space or config.has_draft_model or config.draft_head is not None:
        return replace(config, disable_hybrid_kv_cache_manager=True)
    return config


def _check_devices(config: EngineConfig, device: torch.device) -> None:
    size = config.ranks_per_node
    if device.type != "cuda":
        return
    if device.index is not None:
        raise ConfigError(
            f"device {config.device} is one GPU, and tensor_parallel_size is "
            f"{config.tensor_parallel_size}: set device cuda, and CUDA_VISIBLE_DEVICES to choose "
            "which"
        )
    found = torch.cuda.device_count()
    if found < size:
        nodes = "" if config.nnodes == 1 else f" on {config.nnodes} nodes"
        raise ConfigError(
            f"tensor_parallel_size {config.tensor_parallel_size}{nodes} needs {size} GPUs here, "
            f"and there are {found}"
        )


def _check_model(config: EngineConfig) -> None:
    size = config.tensor_parallel_size
    checkpoint = causal(load_checkpoint(config.model, config.revision))
    name = checkpoint.architecture
    if name not in NATIVE or config.model_implementation == "transformers":
        raise ConfigError(
            f"tensor_parallel_size {size} needs one of the native models, and {name} is served "
            "through transformers: use tensor_parallel_size 1"
        )
    if name in RECURRENT:
        read_family(checkpoint).check_ranks(size, config.enable_expert_parallel)
        return
    check_divisible(ModelConfig.from_hf(checkpoint), size, config.enable_expert_parallel)


def _threads(size: int, device: torch.device) -> int | None:
    """The number of threads of each rank: ranks on CPUs share the cores."""
    if device.type != "cpu":
        return None
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)) // size))
