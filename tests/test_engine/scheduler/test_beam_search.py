"""Beam search and prefix sharing with real models, against transformers on the same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_common.sampling.params import SamplingParams
from headrace_engine import LLM, BeamSearchParams
from headrace_engine.engine.engine import Engine
from headrace_engine.offline.llm import TokensPrompt
from headrace_testing.checkpoints import Reference
from headrace_testing.engines import cpu_backends, engine_config, greedy, make_runner, request, run

CheckpointMaker = Callable[[str], Path]
ReferenceMaker = Callable[[str], Reference]
PROMPTS = ([5, 9, 33, 71, 12], [8] * 9, list(range(40, 61)))


def search(reference: Reference, prompt: list[int], **options: Any) -> list[list[int]]:
    """The output tokens of all of transformers' beams, best first, without padding."""
    width = options["num_beams"]
    with torch.inference_mode():
        found = reference.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            num_return_sequences=width,
            pad_token_id=0,
            **options,
        )
    return [[token for token in row[len(prompt) :].tolist() if token != 0] for row in found]


def engine_beams(engine: Engine, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    outputs = run(engine, [request("beams", prompt, params)])
    return [outputs["beams", choice].token_ids for choice in range(params.n)]


@pytest.fixture(scope="module")
def engine(checkpoint: CheckpointMaker) -> Engine:
    return Engine(engine_config(checkpoint("llama")), make_runner(checkpoint("llama")))


@pytest.mark.parametrize(
    ("prompt", "width", "length_penalty", "early_stopping"),
    [
        (0, 2, 1.0, False),
        (1, 4, 1.0, False),
        (2, 4, 0.0, False),
        (0, 4, 1.0, True),
        (1, 4, 0.0, True),
        (2, 2, -1.0, True),
        (1, 2, 2.0, "never"),
        (2, 4, -1.0, "never"),
    ],
)
def test_beams_are_those_of_transformers(
    engine: Engine,
    reference: ReferenceMaker,
    prompt: int,
    width: int,
    length_penalty: float,
    early_stopping: Any,
) -> None:
    # Ordinary tokens end the beams, since the models hardly ever choose EOS.
    ends = [17, 44, 101]
    wanted = search(
        reference("llama"),
        PROMPTS[prompt],
        num_beams=width,
        max_new_tokens=12,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        eos_token_id=ends,
    )
    params = SamplingParams(
        n=width,
        use_beam_search=True,
        max_tokens=12,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        ignore_eos=True,
        stop_token_ids=ends,
    )
    assert engine_beams(engine, PROMPTS[prompt], params) == wanted
    assert engine.stats().blocks_used == 0


def test_beams_under_pressure_are_those_of_transformers(
    checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    options = {"num_blocks": 16, "max_model_len": 64, "enable_prefix_caching": False}
    config = engine_config(checkpoint("llama"), **options)
    engine = Engine(config, make_runner(checkpoint("llama"), **options))
    prompt = list(PROMPTS[1])
    params = SamplingParams(n=3, use_beam_search=True, max_tokens=14, ignore_eos=True)
    outputs = run(
        engine,
        [request("first", [7] * 24, greedy(36)), request("beams", prompt, params)],
    )
    assert engine.stats().preemptions > 0
    wanted = search(reference("llama"), prompt, num_beams=3, max_new_tokens=14, eos_token_id=-1)
    assert [outputs["beams", choice].token_ids for choice in range(3)] == wanted


def test_the_offline_api_has_vllms_beam_search(
    checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    llm = LLM(str(checkpoint("llama")), dtype="float32", num_blocks=256, max_num_batched_tokens=64)
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    prompt = list(PROMPTS[0])
    (output,) = llm.beam_search([{"prompt_token_ids": prompt}], params)
    wanted = search(reference("llama"), prompt, num_beams=3, max_new_tokens=8, eos_token_id=-1)
    assert [sequence.tokens for sequence in output.sequences] == [[*prompt, *row] for row in wanted]
    scores = [sequence.cum_logprob for sequence in output.sequences]
    assert scores == sorted(scores, reverse=True)
    for sequence in output.sequences:
        assert sequence.finish_reason == "length" and sequence.stop_reason is None
        parts = [
            entry[token].logprob
            for entry, token in zip(sequence.logprobs, sequence.tokens[5:], strict=True)
        ]
        assert sum(parts) == pytest.approx(sequence.cum_logprob)
        assert sequence.text


def test_best_of_returns_the_best_of_the_choices(checkpoint: CheckpointMaker) -> None:
    llm = LLM(str(checkpoint("llama")), dtype="float32", num_blocks=256, max_num_batched_tokens=64)
    every = SamplingParams(n=5, seed=3, max_tokens=6, logprobs=0)
    best = SamplingParams(n=2, best_of=5, seed=3, max_tokens=6)
    prompt: TokensPrompt = {"prompt_token_ids": list(PROMPTS[0])}
    (all_choices,) = llm.generate(prompt, every, use_tqdm=False)
    (chosen,) = llm.generate(prompt, best, use_tqdm=False)
    ranked = sorted(all_choices.outputs, key=lambda each: -(each.cumulative_logprob or 0.0))
    assert [each.token_ids for each in chosen.outputs] == [each.token_ids for each in ranked[:2]]


@pytest.mark.parametrize("backend", cpu_backends())
@pytest.mark.parametrize("threads", [1, 2])
def test_equal_prompts_of_one_step_are_computed_once(
    checkpoint: CheckpointMaker, reference: ReferenceMaker, backend: str, threads: int
) -> None:
    prefix = tuple(range(30, 54))
    paths = reference("llama").clear_paths(4, 6, lambda index: index, lambda _: prefix)
    assert paths[0].prompt == prefix
    options = {"attention_backend": backend, "threads": threads, "max_num_batched_tokens": 128}
    config = engine_config(checkpoint("llama"), **options)
    engine = Engine(config, make_runner(checkpoint("llama"), **options))
    requests = [request(str(k), path.prompt, greedy(6)) for k, path in enumerate(paths)]
    for one in requests:
        engine.add_request(one)
    outputs = engine.step()
    assert len(outputs) == 4
    stats = engine.stats()
    # The others compute the tokens after the prefix; the prompt without output comes first.
    assert stats.step_prefill_tokens == 24 + 1 + 2 + 3
    rest = run(engine, [])
    first = {output.request_id: list(output.token_ids) for output in outputs}
    for name, path in ((str(k), path) for k, path in enumerate(paths)):
        assert first[name] + rest[name, 0].token_ids == list(path.output)
