"""Measures the host's work for one decode step: planning, inputs, launches, results; in
microseconds of its CPU time. The model is a recording whose replay costs nothing.

    PYTHONPATH=engine:common:tests/support python benchmarks/host_steps.py [--batch 1 64 256]
        [--steps 200] [--profile]

On a GPU this work overlaps with the previous step; if that step is shorter, the device waits.
"""

import argparse
import cProfile
import pstats
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gpu_benchmark.engine import Bench
from gpu_benchmark.shapes import SHAPES
from headrace_engine.cuda_graphs.capture import Run
from headrace_engine.cuda_graphs.cuda_graphs import CaptureSizes, GraphedModel
from headrace_engine.cuda_graphs.static_batch import StaticBatch
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.async_execution import StreamExecutor

CPU = torch.device("cpu")
CONTEXT = 64


class HostBench(Bench):
    """Runs steps with asynchronous scheduling, over a model whose replay computes nothing."""

    def __init__(self, folder: Path, batch: int, steps: int) -> None:
        shape = SHAPES["tiny"]
        longest = CONTEXT + steps + 8
        blocks = max(-(-shape.context // 16), (-(-longest // 16) + 1) * batch)
        super().__init__(
            folder, shape, "cpu", max_num_seqs=batch, max_num_batched_tokens=8192,
            num_blocks=blocks, async_scheduling=True,
        )  # fmt: skip
        runner: Any = self.runner
        runner._executor = StreamExecutor(CPU)
        self.engine = Engine(self.config, self.runner)
        self.decoding(batch, CONTEXT, steps)
        logits = torch.zeros(batch, shape.vocab, dtype=torch.bfloat16)

        def free_capture(run: Run) -> Run:
            return lambda: logits

        sizes = CaptureSizes((batch,), (shape.context,))
        static = StaticBatch(batch, -(-shape.context // 16), CPU)
        caches = runner._caches
        runner.model = GraphedModel(runner.model, caches, sizes, static, free_capture)


def measure(batch: int, steps: int) -> float:
    """CPU microseconds per step."""
    with tempfile.TemporaryDirectory() as folder:
        bench = HostBench(Path(folder), batch, steps + 8)
        for _ in range(4):
            bench.engine.step()
        begun = time.process_time()
        for _ in range(steps):
            bench.engine.step()
        return (time.process_time() - begun) / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    for batch in wanted.batch:
        profile = cProfile.Profile() if wanted.profile else None
        if profile is not None:
            profile.enable()
        print(f"batch {batch}: {measure(batch, wanted.steps):.0f} us of CPU a step", flush=True)
        if profile is not None:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
