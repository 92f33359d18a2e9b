"""Measures how fast one engine is, offline, and writes the profile that `headrace simulate` reads.

    python benchmarks/calibrate.py --model DIR --output profile.json
        [--max-num-seqs 64] [--batches 1,2,4,8,16,32,64] [--prompt-tokens 512] [--gpus 1]

It steps a real engine and times every step. Steps that only compute prompts give the prefill speed.
Steps that only decode give the step time of their batch size, with about the prompt's length as
context. The profile has medians. The cold start is loading plus warm-up in this process: add
`--extra-start` seconds for what a pod does before (scheduling, pulling the image, fetching the
weights).
"""

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path

DECODE_STEPS = 24
"""Output tokens of each measured batch."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a checkpoint, or its hub id")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--name", help="name of the profile; default: the model")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--batches", default="1,2,4,8,16,32,64", help="batch sizes to measure")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gpus", type=float, default=1.0, help="what one engine costs")
    parser.add_argument("--extra-start", type=float, default=0.0, help="seconds before loading")
    parser.add_argument("--dtype", default="auto")
    return parser.parse_args()


class Calibration:
    """A real engine whose steps are timed. Prompts are random, so none is in the prefix cache."""

    def __init__(self, options: argparse.Namespace) -> None:
        from headrace_engine.core.config import EngineConfig
        from headrace_engine.engine.engine import Engine
        from headrace_engine.model_runner.model_runner import ModelRunner

        begin = time.monotonic()
        config = EngineConfig(
            model=options.model,
            dtype=options.dtype,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            enable_prefix_caching=False,
        )
        runner = ModelRunner(config)
        runner.warm_up()
        self._engine = Engine(config, runner)
        self.load_seconds = time.monotonic() - begin
        self.kv_tokens = runner.num_blocks * runner.block_size
        self._random = random.Random(0)
        self._vocab_size = runner.vocab_size
        self._count = 0
        self.prefill_speeds: list[float] = []
        self.decode_seconds: dict[int, list[float]] = defaultdict(list)

    def run(self, batch: int, prompt_tokens: int) -> None:
        """Runs `batch` requests to their end and records the times of the steps of one kind."""
        for _ in range(batch):
            self._add(prompt_tokens)
        while self._engine.has_work:
            begin = time.monotonic()
            self._engine.step()
            took = time.monotonic() - begin
            stats = self._engine.stats()
            if stats.step_decode_tokens == 0:
                self.prefill_speeds.append(stats.step_prefill_tokens / took)
            elif stats.step_prefill_tokens == 0:
                self.decode_seconds[stats.step_decode_tokens].append(took)

    def _add(self, prompt_tokens: int) -> None:
        from headrace_common.sampling.params import SamplingParams
        from headrace_engine.core.request import EngineRequest

        self._count += 1
        ids = tuple(self._random.randrange(self._vocab_size) for _ in range(prompt_tokens))
        params = SamplingParams(temperature=0, max_tokens=DECODE_STEPS, ignore_eos=True)
        name = f"calibration-{self._count}"
        request = EngineRequest(request_id=name, prompt_token_ids=ids, params=params, seed=0)
        self._engine.add_request(request)


def main() -> None:
    options = arguments()
    calibration = Calibration(options)
    calibration.run(2, options.prompt_tokens)
    calibration.prefill_speeds.clear()
    calibration.decode_seconds.clear()
    sizes = sorted({int(size) for size in options.batches.split(",")})
    sizes = [size for size in sizes if size <= options.max_num_seqs]
    for _ in range(options.rounds):
        for size in sizes:
            calibration.run(size, options.prompt_tokens)
    steps = {str(size): statistics.median(calibration.decode_seconds[size]) for size in sizes}
    profile = {
        "name": options.name or options.model.rstrip("/").rsplit("/", 1)[-1],
        "prefill_tokens_per_second": statistics.median(calibration.prefill_speeds),
        "decode_step": steps,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "kv_tokens": calibration.kv_tokens,
        "cold_start_seconds": calibration.load_seconds + options.extra_start,
        "gpus": options.gpus,
    }
    options.output.write_text(json.dumps(profile, indent=2) + "\n")
    print(json.dumps(profile, indent=2))


if __name__ == "__main__":
    main()
