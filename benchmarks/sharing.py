"""Measures the savings by shared KV blocks: the most blocks that requests used, and what they would
have used if each sequence had blocks of its own.

    python benchmarks/sharing.py [--model FOLDER_OR_ID] [--prompt 256] [--output 128]

Both are counted in one run, at the step in which most blocks are used: the distinct blocks of the
running sequences, and the sum of the lengths of their block tables. Prints a Markdown table.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace_common.sampling.params import SamplingParams
from headrace_common.text.checkpoint import local_source
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.request import EngineRequest
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Case:
    """There are `requests` requests, whose prompts have all but `own` tokens in common."""

    name: str
    requests: int
    own: int
    params: SamplingParams


def cases(prompt: int, output: int) -> Iterator[Case]:
    one: dict[str, Any] = {"max_tokens": output, "ignore_eos": True}
    yield Case("1 choice", 1, 0, SamplingParams(**one))
    yield Case("4 choices (n=4)", 1, 0, SamplingParams(n=4, **one))
    yield Case("best of 8", 1, 0, SamplingParams(best_of=8, **one))
    yield Case("4 beams", 1, 0, SamplingParams(best_of=4, use_beam_search=True, **one))
    yield Case("8 beams", 1, 0, SamplingParams(best_of=8, use_beam_search=True, **one))
    yield Case("16 requests, one system prompt", 16, prompt // 8, SamplingParams(**one))


def measure(engine: Engine, case: Case, prompt: int) -> tuple[int, int, int]:
    """Returns the blocks used, the blocks without sharing, and the prompt tokens computed."""
    for number in range(case.requests):
        tokens = [5 + index % 90 for index in range(prompt - case.own)]
        tokens += [100 + number] * case.own
        engine.add_request(
            EngineRequest(
                request_id=f"{case.name} {number}",
                prompt_token_ids=tuple(tokens),
                params=case.params,
                seed=number,
                cache_salt=case.name.encode(),
            )
        )
    before, most, alone = engine.stats().prefix_miss_tokens, 0, 0
    while engine.has_work:
        engine.step()
        used = engine.stats().blocks_used
        if used > most:
            most, alone = used, sum(len(each.block_table) for each in engine.running())
    return most, alone, engine.stats().prefix_miss_tokens - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="headrace-demo")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=128)
    options = parser.parse_args()
    config = EngineConfig(model=local_source(options.model), num_blocks=2048)
    engine = Engine(config, ModelRunner(config))
    print("| request | blocks | without sharing | saved | prompt tokens computed |")
    print("| --- | --- | --- | --- | --- |")
    for case in cases(options.prompt, options.output):
        used, alone, computed = measure(engine, case, options.prompt)
        saved = 1 - used / alone
        print(f"| {case.name} | {used} | {alone} | {saved:.0%} | {computed} |", flush=True)


if __name__ == "__main__":
    main()
