"""`headrace_engine.compile_kernels` with few candidates for each launch, and few batches to measure
them with: tests compile in less time, and every kernel is still among them.
"""

from unittest.mock import patch

from headrace_engine import compile_kernels
from headrace_engine.autotune import attention, steps
from headrace_engine.kernels.triton import launch

OVERLAPS = (steps.ONE_BY_ONE, "dependent")


def main(models: list[str]) -> int:
    tiles = {name: getattr(launch, name)[:1] for name in ("DECODE_TILES", "PREFILL_TILES")}
    tiles["VECTOR_TILES"] = {size: few[:1] for size, few in launch.VECTOR_TILES.items()}
    overlaps = {name: steps.CANDIDATES[name] for name in OVERLAPS}
    with (
        patch.multiple(launch, **tiles),
        patch.object(attention, "MOST_ROTATIONS", 1),
        patch.multiple(steps, CANDIDATES=overlaps, FEWER_CANDIDATES=OVERLAPS),
    ):
        return compile_kernels.main(models)
