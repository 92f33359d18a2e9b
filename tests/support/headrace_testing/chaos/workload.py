"""Finds requests of every kind with a state of its own, and their undisturbed answers.

A fault must not change a token, so only cases are used in which rounding cannot change one either:
engines whose weights are off by PERTURBATION, far more than rounding, choose the same tokens.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from headrace_common.structured.structured import StructuredOutputsParams
from headrace_engine import LLM, SamplingParams
from headrace_engine.offline.llm import Prompt
from headrace_testing.checkpoints import VOCAB, save_checkpoint

from .cases import TOKENS, Case, Expected, Workload
from .demands import POISON

PERTURBATION = 2e-5
_EACH = 2
_STOP_CHARS = 2
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "top_p": 0.95},
    "penalties": {
        "temperature": 0,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
    },
    "choices": {"temperature": 0.9, "n": 4},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "stop": {"temperature": 0},
    "grammar": {"temperature": 0.9, "structured_outputs": {"regex": "([a-z]{2,5} )+[a-z]"}},
    # Works like tool calls: the text is free, but an "o" begins a call. Made of letters, which the
    # tokenizer has.
    "calls": {
        "temperature": 0.9,
        "structured_outputs": {
            "structural_tag": {
                "structures": [{"begin": "o ", "schema": {"enum": [None, True]}, "end": " a"}],
                "triggers": ["o"],
            }
        },
    },
}


def make_workload(folder: Path) -> Workload:
    """Saves a tiny model and finds cases of each kind."""
    checkpoint = save_checkpoint(folder / "model", "llama", max_position_embeddings=512)
    models = [checkpoint, *(_perturbed(checkpoint, folder, seed) for seed in range(2))]
    llms = [LLM(str(model), dtype="float32", num_blocks=1024) for model in models]
    wanted = [kind for kind in _KINDS for _ in range(_EACH)]
    rng = random.Random(0)
    found: list[Case] = []
    while wanted:
        clear = _clear(llms, [_draw(rng, kind) for kind in wanted])
        found += clear
        for case in clear:
            wanted.remove(case.name)
    return Workload(checkpoint, tuple(sorted(found, key=lambda case: case.name)))


def _perturbed(checkpoint: Path, folder: Path, seed: int) -> Path:
    """A copy of the checkpoint in which all weights differ a little."""
    copy = folder / f"perturbed-{seed}"
    copy.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (copy / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(checkpoint / "model.safetensors")
    for weight in weights.values():
        weight.mul_(1 + PERTURBATION * torch.randn(weight.shape, generator=generator))
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def _draw(rng: random.Random, kind: str) -> Case:
    """A request without an expected answer."""
    prompt = tuple(rng.randrange(POISON + 1, VOCAB) for _ in range(rng.randrange(4, 60)))
    return Case(kind, prompt, {**_KINDS[kind], "seed": rng.randrange(2**31)}, ())


def _clear(llms: Sequence[LLM], cases: Sequence[Case]) -> list[Case]:
    """The cases for which all models agree, with their answers; cases with `stop` get a stop
    string."""
    answers = [_answers(llm, cases) for llm in llms]
    agreed = [
        replace(case, expected=choices[0])
        for case, *choices in zip(cases, *answers, strict=True)
        if all(other == choices[0] for other in choices)
    ]
    stopping = [stop for case in agreed if case.name == "stop" if (stop := _with_stop(case))]
    rest = [case for case in agreed if case.name != "stop"]
    ended = zip(stopping, _answers(llms[0], stopping), strict=True)
    return [*rest, *(replace(case, expected=expected) for case, expected in ended)]


def _answers(llm: LLM, cases: Sequence[Case]) -> list[tuple[Expected, ...]]:
    params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, **_fields(case)) for case in cases]
    given: list[Prompt] = [{"prompt_token_ids": list(case.prompt)} for case in cases]
    return [
        tuple(
            Expected(tuple(choice.token_ids), str(choice.finish_reason), choice.text)
            for choice in output.outputs
        )
        for output in llm.generate(given, params, use_tqdm=False)
    ]


def _fields(case: Case) -> dict[str, Any]:
    """The fields of the request for the offline API."""
    held = case.fields.get("structured_outputs")
    if held is None:
        return dict(case.fields)
    return {**case.fields, "structured_outputs": StructuredOutputsParams(**held)}


def _with_stop(case: Case) -> Case | None:
    """The same request with a stop string that first occurs after its middle."""
    text = case.expected[0].text
    for start in range(len(text) // 2, len(text) - _STOP_CHARS):
        stop = text[start : start + _STOP_CHARS]
        if "\ufffd" not in stop and text.find(stop) == start:
            return replace(case, fields={**case.fields, "stop": [stop]})
    return None
