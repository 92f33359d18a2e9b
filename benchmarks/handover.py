"""Measures on real processes what a hand-over from a producer to a consumer costs.

    PYTHONPATH=tests/support python benchmarks/handover.py [--prompt-tokens 800] [--rounds 9]

Streams one request at a time through a gateway, in turns from an engine that does everything and
from a producer and a consumer, each pair with a model name of its own. The table has the longest
pause between two tokens of a stream, the time to its first token and the seconds of a hand-over as
the producer measures them: medians of all rounds, with the least and the largest. Prints a Markdown
table.
"""

import argparse
import json
import time
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import httpx

from headrace_common.text.checkpoint import local_source
from headrace_testing.processes import until
from headrace_testing.stack import EngineProcess, GatewayProcess
from headrace_testing.valkey import ValkeyServer

TOGETHER, APART = "together", "apart"


class Stream(NamedTuple):
    """Seconds until the first token, and the longest pause between two tokens."""

    first: float
    pause: float


def engine(
    model: str, name: str, url: str, folder: Path, log: str, role: str, threads: int
) -> EngineProcess:
    flags = [
        "--kv-role",
        role,
        "--max-local-prefill-length",
        "64",
        "--threads",
        str(threads),
        "--max-num-seqs",
        "8",
    ]
    flags += ["--kv-offloading-folder", str(folder / f"kv-{name}"), "--swap-space", "0.25"]
    return EngineProcess(Path(model), url, folder / f"{log}.log", *flags, model=name)


def stream(url: str, model: str, prompt: list[int], output: int) -> Stream:
    body = {"model": model, "prompt": prompt, "max_tokens": output, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
    begun, times = time.perf_counter(), list[float]()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line[6:]).get("choices")
            if choices and choices[0].get("token_ids"):
                times.append(time.perf_counter())
    pauses = [after - before for before, after in zip(times, times[1:], strict=False)]
    return Stream(times[0] - begun, max(pauses))


def spread(values: list[float]) -> str:
    low, middle, high = (1000 * each for each in (min(values), median(values), max(values)))
    return f"{middle:.0f} ms ({low:.0f} to {high:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--model", default="headrace-demo")
    parser.add_argument("--prompt-tokens", type=int, default=800)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    model = local_source(given.model)
    rng, found = Random(3), {TOGETHER: list[Stream](), APART: list[Stream]()}
    with TemporaryDirectory() as name:
        folder = Path(name)
        valkey = ValkeyServer(folder / "valkey")
        valkey.start()
        parts = (
            (TOGETHER, "kv_both"),
            (APART, "kv_producer"),
            (APART, "kv_consumer"),
        )
        engines = [
            engine(model, served, valkey.url, folder, role, role, given.threads)
            for served, role in parts
        ]
        gateway = GatewayProcess(None, valkey.url, folder / "gateway.log")
        try:
            for each in engines:
                each.await_log("engine ready")
            until(lambda: gateway.ready, "the gateway to be ready")
            time.sleep(2.0)  # until the engines have seen each other
            for turn in range(given.rounds + 2):
                prompt = [rng.randrange(10, 250) for _ in range(given.prompt_tokens)]
                for served in (TOGETHER, APART) if turn % 2 else (APART, TOGETHER):
                    one = stream(gateway.url, served, prompt, given.output_tokens)
                    if turn >= 2:  # the first ones warm the processes up
                        found[served].append(one)
            count = engines[1].metric("headrace_engine_handover_duration_seconds_count")
            seconds = engines[1].metric("headrace_engine_handover_duration_seconds_sum") / count
        finally:
            for process in (*engines, gateway):
                process.kill()
            valkey.stop()
    print("| engines | longest pause | time to the first token |")
    print("| --- | ---: | ---: |")
    for served, streams in found.items():
        pauses, firsts = [each.pause for each in streams], [each.first for each in streams]
        print(f"| {served} | {spread(pauses)} | {spread(firsts)} |")
    print(f"\n{count:.0f} hand-overs, each {1000 * seconds:.0f} ms on average in the producer.")


if __name__ == "__main__":
    main()
