"""Async scheduling gives the same outputs as synchronous steps.

The demo model in float32 runs on a thread that stands in for a device, and results are read late,
as on a GPU. Not covered: a GPU's own streams and events.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace_common.sampling.params import SamplingParams
from headrace_common.structured.structured import StructuredOutputsParams
from headrace_common.text.checkpoint import demo_folder
from headrace_common.text.tokenizer import Tokenizer
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.outputs import TokenLogprobs
from headrace_engine.core.request import EngineRequest, FinishReason
from headrace_engine.core.speculative_config import SpeculativeConfig
from headrace_engine.core.step_plan import PendingStep, SchedulerOutput
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.async_execution import Step, StreamExecutor
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.serving.settings import EngineSettings
from headrace_engine.structured_output.compiler import GrammarCompiler
from headrace_testing.engines import Output

OPTIONS: dict[str, Any] = {
    "model": str(demo_folder()),
    "dtype": "float32",
    "device": "cpu",
    "block_size": 4,
    "num_blocks": 400,
    "max_model_len": 96,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 48,
    "threads": 1,
}
# A third of the blocks that all requests need together, and memory for swapping.
TIGHT: dict[str, Any] = {**OPTIONS, "num_blocks": 60, "swap_space": 0.02, "watermark": 0.0}
EOS = (0, 2)
PREFIX = tuple(range(300, 312))
REGEX = "([a-z]{2,5} ){3,9}[a-z]{1,4}[.]"
Choice = tuple[str, int]
MIXED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 3},
    {"temperature": 0.9, "seed": 5, "n": 3, "ignore_eos": True},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_tokens": 9, "stop_token_ids": [19]},
    {"temperature": 0.7, "min_p": 0.05, "frequency_penalty": 0.8, "presence_penalty": 0.2},
    {"temperature": 0.0, "logit_bias": {31: 6.0}, "max_tokens": 17, "logprobs": 0},
    {"temperature": 1.0, "regex": REGEX},
    {"temperature": 1.0, "regex": REGEX, "n": 2, "min_tokens": 8, "logprobs": 1},
    {"temperature": 0.0, "prompt_logprobs": 2, "max_tokens": 9},
    {"temperature": 1.0, "best_of": 3, "n": 2, "max_tokens": 12},
    {"temperature": 0.0, "use_beam_search": True, "best_of": 3, "n": 2, "max_tokens": 10},
    {"temperature": 1.0, "max_tokens": 1},
    {"temperature": 1.0, "bad_words_token_ids": [[400], [401, 402]], "allowed_token_ids": None},
    {"temperature": 0.8, "stop_token_ids": list(range(300, 900)), "min_tokens": 3},
)


class Watched(ModelRunner):
    """Counts the steps that were planned ahead; each raises `error` while one is set."""

    ahead = 0
    error: Exception | None = None

    def submit(self, scheduler_output: SchedulerOutput) -> PendingStep:
        self.ahead += scheduler_output.ahead
        return super().submit(scheduler_output)

    def _launch(self, step: Step) -> None:
        if self.error is not None:
            raise self.error
        super()._launch(step)


@pytest.fixture(scope="module")
def requests() -> list[EngineRequest]:
    tokenizer = Tokenizer.load(demo_folder())
    compiler = GrammarCompiler(tokenizer, 2048, frozenset(EOS))
    found: list[EngineRequest] = []
    for index, given in enumerate(MIXED):
        options = {"max_tokens": 24, **given}
        regex = options.pop("regex", None)
        structured = None if regex is None else StructuredOutputsParams(regex=regex)
        params = SamplingParams(structured_outputs=structured, **options)
        found.append(
            EngineRequest(
                request_id=f"r{index}",
                prompt_token_ids=(*PREFIX[: 4 * (index % 4)], *range(50, 55 + index)),
                params=params,
                seed=index,
                arrival=float(index),
                priority=-index % 3,
                tenant="ab"[index % 2],
                grammar=None if structured is None else compiler.compile(structured),
            )
        )
    return found


def run(
    engine: Engine, requests: Iterable[EngineRequest], until: Mapping[str, int] | None = None
) -> dict[Choice, Output]:
    """Adds a request every second step; those in `until` are aborted after that many tokens."""
    remaining = list(requests)
    resumed = {one.request_id: len(one.resume[0]) for one in remaining if one.resume}
    outputs: dict[Choice, Output] = {}
    steps = 0
    while remaining or engine.has_work:
        if remaining and steps % 2 == 0:
            engine.add_request(remaining.pop(0))
        steps += 1
        for step in engine.step():
            output = outputs.setdefault((step.request_id, step.choice), Output())
            assert output.finish_reason is None, "an output after the end"
            assert step.index == resumed.get(step.request_id, 0) + len(output.token_ids)
            output.token_ids.extend(step.token_ids)
            output.logprobs.extend((*(step.prompt_logprobs or ()), *(step.logprobs or ())))
            output.finish_reason = step.finish_reason
            if until and len(output.token_ids) >= until.get(step.request_id, 1000):
                engine.abort(step.request_id)
                output.finish_reason = output.finish_reason or "aborted"
    assert engine.stats().running == engine.stats().blocks_used == 0
    return outputs


@pytest.fixture(scope="module")
def expected(requests: list[EngineRequest]) -> dict[Choice, Output]:
    """The outputs of an engine with synchronous steps and room for all requests."""
    config = EngineConfig(**OPTIONS, async_scheduling=False)
    return run(Engine(config, ModelRunner(config)), requests)


@pytest.fixture(scope="module", params=["thread", "stream", "tight thread", "tight stream"])
def runner(request: pytest.FixtureRequest) -> Iterator[Watched]:
    room, _, kind = request.param.rpartition(" ")
    options = TIGHT if room else OPTIONS
    executor = StreamExecutor(torch.device("cpu")) if kind == "stream" else None
    yield Watched(EngineConfig(**options, async_scheduling=True), executor=executor)


@pytest.fixture(scope="module")
def late_runner() -> Watched:
    config = EngineConfig(**OPTIONS, async_scheduling=True)
    return Watched(config)


def test_tokens_equal_those_of_synchronous_steps(
    runner: Watched, requests: list[EngineRequest], expected: dict[Choice, Output]
) -> None:
    engine = Engine(EngineConfig(**OPTIONS, policy="priority"), runner)
    same(run(engine, requests), expected)
    assert runner.ahead > 20
    stats = engine.stats()
    if runner.host_kv_cache is not None:
        assert stats.preemptions + stats.swaps > 0, "the pool should be too small"


def same(found: dict[Choice, Output], expected: dict[Choice, Output]) -> None:
    """Asserts equal tokens and ends, and log probabilities that differ only by rounding."""
    assert found.keys() == expected.keys()
    for key, output in found.items():
        other = expected[key]
        assert (key, output.token_ids, output.finish_reason) == (
            key,
            other.token_ids,
            other.finish_reason,
        )
        check_logprobs(output.logprobs, other.logprobs)


def check_logprobs(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert [one.rank for one in found] == [one.rank for one in expected]
    values = [one.logprob for one in found]
    assert values == pytest.approx([one.logprob for one in expected], abs=1e-4)


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "fair", "deadline"])
def test_choices_that_are_aborted_in_flight_do_not_change_others(
    policy: str, late_runner: Watched, requests: list[EngineRequest], expected: dict[Choice, Output]
) -> None:
    engine = Engine(EngineConfig(**OPTIONS, policy=policy), late_runner)
    until = {"r0": 5, "r2": 2, "r6": 3, "r8": 1}

    found = run(engine, requests, until)

    for (name, choice), output in found.items():
        other = expected[name, choice].token_ids
        if name in until:
            other = other[: len(output.token_ids)]
        assert (name, choice, output.token_ids) == (name, choice, other)
    assert found["r0", 0].finish_reason == "aborted"


def test_unset_async_scheduling_depends_on_the_device() -> None:
    """It is on for GPUs and off for CPUs."""
    unset = EngineSettings(model="m")
    given = [EngineSettings(model="m", async_scheduling=value) for value in (True, False)]
    wanted = [settings.engine_config().async_scheduling for settings in (unset, *given)]
    assert wanted == [None, True, False]
    on_cpu = Watched(EngineConfig(**{**OPTIONS, "num_blocks": 30}))
    assert not on_cpu.async_scheduling


def test_speculation_runs_synchronous_steps(requests: list[EngineRequest]) -> None:
    """Drafts need the tokens before them. Both settings together are allowed, but steps are
    synchronous."""
    speculation = SpeculativeConfig(method="ngram", prompt_lookup_min=1, adaptive=False)
    config = EngineConfig(**OPTIONS, async_scheduling=True, speculative_config=speculation)
    runner = Watched(config)
    engine = Engine(config, runner)
    repeating = replace(requests[0], prompt_token_ids=(30, 31, 32) * 4)

    found = run(engine, [repeating])

    assert len(found["r0", 0].token_ids) == 24
    speculated = engine.stats().speculation
    assert speculated is not None and speculated.draft_tokens > 0
    assert runner.ahead == 0


def test_the_engine_raises_a_steps_error_and_runs_the_next_request(
    late_runner: Watched, requests: list[EngineRequest], expected: dict[Choice, Output]
) -> None:
    engine = Engine(EngineConfig(**OPTIONS), late_runner)
    engine.add_request(requests[0])
    engine.step()
    late_runner.error = RuntimeError("the device is gone")
    with pytest.raises(RuntimeError, match="the device is gone"):
        for _ in range(3):
            engine.step()
    engine.abort("r0")
    late_runner.error = None

    found = run(engine, requests[1:2])

    assert found["r1", 0].token_ids == expected["r1", 0].token_ids


def test_a_broken_row_ends_its_own_request_and_no_other(
    late_runner: Watched, requests: list[EngineRequest], expected: dict[Choice, Output]
) -> None:
    """A grammar that refuses the output masks all logits. This is known only after the launch of
    the next step."""
    engine = Engine(EngineConfig(**OPTIONS), late_runner)
    digits = tuple(Tokenizer.load(demo_folder()).encode("77"))

    found = run(engine, [requests[0], replace(requests[6], resume=(digits,)), requests[1]])

    broken = found["r6", 0]
    assert (broken.finish_reason, broken.token_ids) == (FinishReason.ERROR, [])
    for name in ("r0", "r1"):
        assert found[name, 0].token_ids == expected[name, 0].token_ids
