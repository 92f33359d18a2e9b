"""Log probabilities of prompts and outputs compared with transformers: in chunks, with shared
blocks, after preemption."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_engine import LLM, SamplingParams
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.outputs import SequenceOutput
from headrace_engine.core.request import EngineRequest
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.scheduler.prefill import MAX_SCORED
from headrace_testing.checkpoints import Reference

CheckpointMaker = Callable[[str], Path]
ReferenceMaker = Callable[[str], Reference]

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_blocks": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2 * MAX_SCORED,
    "threads": 1,
}
PROMPT = [3 + (7 * index) % 250 for index in range(300)]


@pytest.fixture(scope="module")
def llm(checkpoint: CheckpointMaker) -> LLM:
    return LLM(str(checkpoint("llama")), **OPTIONS)


@pytest.fixture(scope="module")
def expected(reference: ReferenceMaker) -> torch.Tensor:
    """float32 log probabilities [T, V] after each token of the prompt."""
    with torch.inference_mode():
        logits = reference("llama").model(torch.tensor([PROMPT])).logits[0]
    return torch.log_softmax(logits.float(), -1)


def scored(count: int = 3, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": 4, "prompt_logprobs": count, **options}
    )


def generate(llm: LLM, *params: SamplingParams, prompt: list[int] | None = None) -> list[Any]:
    each: Any = {"prompt_token_ids": PROMPT if prompt is None else prompt}
    return llm.generate([each] * len(params), list(params), use_tqdm=False)


@pytest.mark.parametrize("count", [0, 1, 20])
def test_prompt_logprobs_equal_those_of_transformers(
    llm: LLM, expected: torch.Tensor, count: int
) -> None:
    (output,) = generate(llm, scored(count))

    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(PROMPT)
    for place, position in enumerate(output.prompt_logprobs[1:]):
        token, row = PROMPT[place + 1], expected[place]
        assert position[token].logprob == pytest.approx(row[token].item(), abs=2e-4)
        assert position[token].rank == 1 + int((row > row[token]).sum())
        best = row.topk(count).values.tolist() if count else []
        found = sorted(
            (one.logprob for one in position.values() if one.rank <= count), reverse=True
        )
        assert found[:count] == pytest.approx(best, abs=2e-4)


def test_twenty_alternatives_of_outputs_are_exact(llm: LLM, reference: ReferenceMaker) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=20, ignore_eos=True)
    (output,) = generate(llm, params, prompt=PROMPT[:20])
    choice = output.outputs[0]

    with torch.inference_mode():
        ids = [*PROMPT[:20], *choice.token_ids]
        rows = torch.log_softmax(
            reference("llama").model(torch.tensor([ids])).logits[0].float(), -1
        )
    for place, position in enumerate(choice.logprobs):
        best = rows[19 + place].topk(20)
        ranked = sorted(position.items(), key=lambda item: item[1].rank)
        assert [token for token, _ in ranked] == best.indices.tolist()
        assert [one.logprob for _, one in ranked] == pytest.approx(best.values.tolist(), abs=2e-4)


def test_other_requests_get_the_same_tokens_and_no_prompt_logprobs(llm: LLM) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=8)
    (alone,) = generate(llm, plain)

    outputs = generate(llm, plain, scored(2, n=2, max_tokens=8), plain, scored(0, max_tokens=8))

    assert all(one.outputs[0].token_ids == alone.outputs[0].token_ids for one in outputs)
    assert [one.prompt_logprobs is None for one in outputs] == [True, False, True, False]


def test_prompt_logprobs_do_not_use_the_prefix_cache(llm: LLM) -> None:
    generate(llm, SamplingParams(max_tokens=1))

    (output,) = generate(llm, scored())

    assert output.num_cached_tokens == 0
    assert all(output.prompt_logprobs[1:])


def test_a_prompt_of_one_token_has_no_log_probabilities(llm: LLM) -> None:
    (output,) = generate(llm, scored(), prompt=[5])

    assert output.prompt_logprobs == [None]


# In the engine's core


@pytest.fixture(scope="module")
def runner(checkpoint: CheckpointMaker) -> ModelRunner:
    return ModelRunner(
        EngineConfig(model=str(checkpoint("llama")), **{**OPTIONS, "num_blocks": 40})
    )


def steps(runner: ModelRunner, *requests: EngineRequest) -> list[list[SequenceOutput]]:
    engine = Engine(EngineConfig(model="tiny", **OPTIONS), runner)
    for each in requests:
        engine.add_request(each)
    found = []
    while engine.has_work:
        found.append(engine.step())
    return found


def request(name: str, params: SamplingParams, **options: Any) -> EngineRequest:
    return EngineRequest(
        request_id=name, prompt_token_ids=tuple(PROMPT), params=params, seed=1, **options
    )


def test_a_step_scores_no_more_than_its_limit_and_lets_others_pass(runner: ModelRunner) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=4)

    found = steps(runner, request("scored", scored(1)), request("plain", plain))

    first: dict[str, int] = {}
    for index, step in enumerate(found):
        for output in step:
            first.setdefault(output.request_id, index)
    assert first["scored"] == -(-len(PROMPT) // MAX_SCORED) - 1
    assert first["plain"] <= first["scored"]
    whole = [output for step in found for output in step if output.prompt_logprobs is not None]
    assert len(whole) == 1 and whole[0].index == 0
    assert len(whole[0].prompt_logprobs or ()) == len(PROMPT) - 1


def test_a_preempted_prompt_is_scored_once(runner: ModelRunner) -> None:
    """Three prompts of 19 blocks share 40 blocks, so they are preempted; each is scored once."""
    params = [scored(2, max_tokens=40, ignore_eos=True, n=2, seed=one) for one in range(3)]
    alone = [steps(runner, request("r", one)) for one in params]

    found = steps(runner, *(request(f"r{index}", one) for index, one in enumerate(params)))

    for index, lone in enumerate(alone):
        name = f"r{index}"
        found_scores = [o.prompt_logprobs for s in found for o in s if o.request_id == name]
        (scores,) = [one for one in found_scores if one is not None]
        (expected,) = [o.prompt_logprobs for s in lone for o in s if o.prompt_logprobs is not None]
        assert [one.rank for one in scores] == [one.rank for one in expected]


def test_a_client_that_has_tokens_has_the_scores_too(runner: ModelRunner) -> None:
    found = steps(runner, request("r", scored(2), resume=((7,),)))

    assert all(output.prompt_logprobs is None for step in found for output in step)
