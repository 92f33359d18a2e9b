"""Measures the tiers of the prefix cache: what they save in a conversation, and what they cost
where nothing is shared.

    python benchmarks/tiers.py [--model FOLDER_OR_ID] [--turns 10] [--rounds 16] [--requests 12]

Conversation: each turn's prompt is the one before, its answer and new tokens. The engine is
replaced between turns. The table has the tokens that were computed again: their KV was computed by
an earlier engine. Random prompts: an engine without tiers and one with them run the same requests,
step by step in turns, in KV caches that are too small for them, so that blocks are evicted all the
time. The table has the ratio of the times of their steps. The thread that writes to the folder
works during the steps of both: half of its time is taken off those of the engine without tiers.
Prints Markdown tables.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from headrace_common.sampling.params import SamplingParams
from headrace_common.text.checkpoint import local_source
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.request import EngineRequest
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner

# Seconds in which an engine that ends writes its last blocks.
CLOSING = 60.0
# Rounds that fill the caches and the host's memory.
WARM_UP = 4


class Round(NamedTuple):
    """Seconds of all steps of the same requests without and with tiers, and of writing blocks."""

    none: float
    tiers: float
    written: float

    @property
    def ratio(self) -> float:
        return self.tiers / (self.none - self.written / 2)


Tiers = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a turn, of its answer, and of random prompts and their answers."""

    turn: int
    answer: int
    prompt: int
    output: int


def tiers(folder: str) -> dict[str, Tiers]:
    host = {"swap_space": 0.1}
    return {"none": {}, "host": host, "host and folder": {**host, "kv_offloading_folder": folder}}


def make_engine(model: str, **options: object) -> Engine:
    values: dict[str, Any] = {"model": local_source(model), "max_num_seqs": 16, **options}
    config = EngineConfig(**values)
    runner = ModelRunner(config)
    runner.warm_up()
    return Engine(config, runner)


def add(engine: Engine, prompts: list[list[int]], output: int) -> None:
    """Adds a request of greedy tokens for each prompt, named by its number."""
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        request = EngineRequest(
            request_id=str(number), prompt_token_ids=tuple(prompt), params=params, seed=1
        )
        engine.add_request(request)


def answer(engine: Engine, prompt: list[int], output: int) -> list[int]:
    """Greedy tokens after the prompt."""
    add(engine, [prompt], output)
    found: list[int] = []
    while engine.has_work:
        for one in engine.step():
            found += one.token_ids
    return found


def converse(
    model: str, options: Tiers, turns: int, lengths: Lengths
) -> tuple[list[int], int, int]:
    """The last prompt with its answer, the tokens computed again, all tokens that had been computed
    before."""
    rng, known, before = Random(1), list[int](), 0
    again = reusable = 0
    for _ in range(turns):
        engine = make_engine(model, num_blocks=256, **options)
        known += [rng.randrange(10, 250) for _ in range(lengths.turn)]
        new = answer(engine, known, lengths.answer)
        engine.close(CLOSING)
        again += engine.stats().prefix_miss_tokens - (len(known) - before)
        reusable += before
        known += new
        before = len(known) - 1  # the last token of an answer is not computed
    return known, again, reusable


def compare(
    model: str, options: Tiers, rounds: int, requests: int, lengths: Lengths
) -> Iterator[Round]:
    """The times with tiers and without, round by round.

    What is written to the folder after a round, while nothing runs, does not count.
    """
    rng = Random(2)
    blocks = {"num_blocks": 16 * -(-(lengths.prompt + lengths.output) // 16) + 16}
    engines = [make_engine(model, **blocks), make_engine(model, **blocks, **options)]
    for turn in range(WARM_UP + rounds):
        prompts = [[rng.randrange(10, 250) for _ in range(lengths.prompt)] for _ in range(requests)]
        written = -_seconds_of_writing(engines[1])
        for engine in engines:
            add(engine, prompts, lengths.output)
        none, tiered = _step_in_turns(engines)
        written += _seconds_of_writing(engines[1])
        engines[1].close(CLOSING)
        if turn >= WARM_UP:
            yield Round(none, tiered, written)


def _seconds_of_writing(engine: Engine) -> float:
    shared = engine.stats().shared
    return 0.0 if shared is None else shared.seconds_out


def _step_in_turns(engines: list[Engine]) -> list[float]:
    """The seconds of all steps of each engine, which take turns with who is first."""
    seconds = [0.0] * len(engines)
    order = list(range(len(engines)))
    while any(engine.has_work for engine in engines):
        order.reverse()
        for which in order:
            begun = time.perf_counter()
            engines[which].step()
            seconds[which] += time.perf_counter() - begun
    return seconds


def _columns(rounds: list[Round]) -> str:
    low, middle, high = quantiles([one.ratio for one in rounds], n=4)
    return f"{len(rounds)} | {middle:.3f} | {low:.3f} to {high:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--model", default="headrace-demo")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--turn-tokens", type=int, default=60)
    parser.add_argument("--answer-tokens", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=400)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="where folders are made; default: temporary")
    given = parser.parse_args()
    lengths = Lengths(
        given.turn_tokens, given.answer_tokens, given.prompt_tokens, given.output_tokens
    )
    print("| tiers | computed before | computed again | share | same tokens |")
    print("| --- | --- | --- | --- | --- |")
    expected: list[int] = []
    with TemporaryDirectory(dir=given.folder) as folder:
        for name, options in tiers(folder).items():
            known, again, reusable = converse(given.model, options, given.turns, lengths)
            expected = expected or known
            same = known == expected
            row = name, str(reusable), str(again), f"{again / reusable:.1%}", str(same)
            print("|", " | ".join(row), "|", flush=True)
    print()
    print("| tiers | rounds | time | quartiles |")
    print("| --- | --- | --- | --- |")
    with TemporaryDirectory(dir=given.folder) as folder:
        for name, options in tiers(folder).items():
            rounds = list(compare(given.model, options, given.rounds, given.requests, lengths))
            print(f"| {name} | {_columns(rounds)} |", flush=True)


if __name__ == "__main__":
    main()
