"""Computes how many KV blocks fit, from the memory left after a profile run.

Reads memory counters of the device, the operating system and the container. Allocates nothing.
"""

import gc
import logging
import re
from collections.abc import Callable
from pathlib import Path

import torch

from ..core.config import EngineConfig
from ..core.errors import ConfigError

logger = logging.getLogger(__name__)

# With prefix caching, blocks beyond those of running sequences serve later requests. CPU memory is
# shared with other processes, so there the cache is limited to this many times the running blocks.
CPU_CACHE_FACTOR = 4

GIB = 2**30

# Runs the largest step that the configuration allows. Returns the bytes that are allocated after
# the cache: those of CUDA graphs.
Profile = Callable[[], int]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def count_blocks(
    config: EngineConfig,
    device: torch.device,
    bytes_per_block: int,
    sequence: int,
    profile: Profile,
) -> int:
    """The number of KV blocks that fit. The longest sequence needs `sequence` blocks.

    A model without KV (blocks of 0 bytes) gets as many blocks as its sequences can fill. Raises
    ConfigError if not even one block fits.
    """
    if config.num_blocks is not None:
        blocks = config.num_blocks
    elif bytes_per_block == 0:
        blocks = config.max_num_seqs * sequence
    elif config.kv_cache_bytes is not None:
        blocks = config.kv_cache_bytes // bytes_per_block
    else:
        blocks = _measured(config, device, bytes_per_block, sequence, profile)
    if blocks < 1:
        raise ConfigError(
            f"the KV cache has no room for one block of {bytes_per_block} bytes: raise "
            "kv_cache_bytes, num_blocks or memory_utilization, or use a smaller model"
        )
    return blocks


def count_host_blocks(config: EngineConfig, device: torch.device, bytes_per_block: int) -> int:
    """The number of blocks that fit the swap space. Raises ConfigError if memory is too small."""
    wanted = int(config.swap_space * GIB)
    if wanted == 0:
        return 0
    available = available_memory() // config.ranks_per_node
    if device.type == "cuda" and wanted > available:
        raise ConfigError(
            f"swap_space is {config.swap_space} GiB, but {available / GIB:.1f} GiB of host memory "
            "are free: lower it"
        )
    if wanted < bytes_per_block:
        raise ConfigError(
            f"swap_space {config.swap_space} GiB is less than one KV block of {bytes_per_block} "
            "bytes: raise it, or set it to 0"
        )
    return wanted // bytes_per_block


def _measured(
    config: EngineConfig,
    device: torch.device,
    bytes_per_block: int,
    sequence: int,
    profile: Profile,
) -> int:
    # Tuning leaves tensors in cycles of references, which only the collector frees.
    gc.collect()
    if device.type == "cuda":
        return _cuda_free(device, config, profile) // bytes_per_block
    free = _cpu_free(config, profile) - int(config.swap_space * GIB)
    useful = config.max_num_seqs * sequence
    useful *= CPU_CACHE_FACTOR if config.enable_prefix_caching else 1
    return min(free // bytes_per_block, useful)


def _cuda_free(device: torch.device, config: EngineConfig, profile: Profile) -> int:
    """The bytes for the cache: `memory_utilization` of the GPU, minus what is in use, the step's
    peak, and what is allocated after the cache."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    later = profile()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    logger.info("memory measured", extra={"step_bytes": peak, "graph_bytes": later})
    return int(total * config.memory_utilization) - (total - free) - peak - later


def _cpu_free(config: EngineConfig, profile: Profile) -> int:
    """The bytes for the cache: `memory_utilization` of what is available, minus the step's peak,
    and what is allocated after the cache."""
    measurable = _reset_peak()
    before = _resident("VmRSS")
    later = profile()
    peak = max(0, _resident("VmHWM" if measurable else "VmRSS") - before)
    available = available_memory() + max(0, _resident("VmRSS") - before)
    logger.info("memory measured", extra={"available_bytes": available, "step_bytes": peak})
    # A node's ranks on CPUs share its memory.
    return int(available * config.memory_utilization) // config.ranks_per_node - peak - later


def available_memory() -> int:
    """Bytes that this process may still allocate, by the machine and its container's limit."""
    import psutil

    available: int = psutil.virtual_memory().available
    limit = cgroup_room()
    return available if limit is None else min(available, limit)


def cgroup_room(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left below the memory limit of cgroup v2 or v1; None without a limit.

    Inactive file pages count as free: the kernel releases them on demand.
    """
    for limit_file, usage_file, stat_file, cached in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        limit, usage = _number(root / limit_file), _number(root / usage_file)
        if limit is not None and usage is not None:
            return max(0, limit - usage + _stat(root / stat_file, cached))
    return None


def _number(path: Path) -> int | None:
    """The number in a file; None if the file does not exist or says `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, name: str) -> int:
    try:
        found = re.search(rf"^{name} (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _reset_peak() -> bool:
    """Resets the process's peak memory (VmHWM) to its present size; False if that is impossible."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _resident(name: str) -> int:
    """VmRSS or VmHWM in bytes; without /proc psutil's resident size."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024
    import psutil

    resident: int = psutil.Process().memory_info().rss
    return resident
