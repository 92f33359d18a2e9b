"""Measures the host's CPU time for a step of many decodes and one prompt, and for a step of decodes
only. Alternates between engines with and without CUDA graphs for steps with prompts.

    PYTHONPATH=engine:common:benchmarks:tests/support \\
        python -m headrace_testing.null_cuda benchmarks/host_mixed_steps.py [--rounds 4]

needs no GPU: the device computes nothing. On a GPU, run the file itself.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from gpu_benchmark.engine import Bench
from gpu_benchmark.shapes import Shape
from headrace_engine.cuda_graphs.cuda_graphs import DecodeRecorder

# As many layers as a model of 8 billion parameters, so as many launches.
SHAPE = Shape(256, 512, 32, 4, 2, 64, 512, 16_384)
DECODES, PROMPT, STEPS = 200, 250, 20
ENDLESS = 8000


def bench(folder: Path, recorded: bool) -> Bench:
    """An engine with DECODES decoding sequences.

    If `recorded` is False, only decode steps have graphs.
    """
    without = patch.object(DecodeRecorder, "mixed_batch", lambda _: None)
    with nullcontext() if recorded else without:
        made = Bench(
            folder, SHAPE, "cuda", max_num_seqs=256, max_num_batched_tokens=8192,
            num_blocks=DECODES * ENDLESS // 16, attention_backend="triton", enable_autotuner=False,
        )  # fmt: skip
    made.decoding(DECODES, 20, ENDLESS)
    return made


def milliseconds(made: Bench, prompt: int) -> float:
    """The median CPU time of a step that includes a new prompt of `prompt` tokens (0: none)."""
    found = []
    for _ in range(STEPS):
        if prompt:
            made.add(made.prompt(prompt), 1)
        begun = time.process_time()
        made.engine.step()
        found.append(time.process_time() - begun)
    return 1e3 * statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        benches = {
            kind: bench(Path(folder), kind == "recorded") for kind in ("recorded", "launched")
        }
        for _ in range(rounds):
            for kind, one in benches.items():
                mixed, decodes = milliseconds(one, PROMPT), milliseconds(one, 0)
                print(f"{kind}: with a prompt {mixed:.2f} ms, decodes {decodes:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
