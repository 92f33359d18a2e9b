"""`headrace_engine.compile_kernels` with few candidates for each launch: tests compile in less
time, and every kernel is still among them.
"""

from headrace_engine import compile_kernels
from headrace_engine.autotune import steps
from headrace_engine.kernels.triton import launch

OVERLAPS = (steps.ONE_BY_ONE, "dependent")


def main(models: list[str]) -> int:
    launch.DECODE_TILES = launch.DECODE_TILES[:1]
    launch.PREFILL_TILES = launch.PREFILL_TILES[:1]
    steps.CANDIDATES = {name: steps.CANDIDATES[name] for name in OVERLAPS}
    steps.FUSED_CANDIDATES = OVERLAPS
    return compile_kernels.main(models)
