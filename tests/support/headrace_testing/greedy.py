"""Prompts whose greedy output is certain: transformers' logits have no near-ties."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from headrace_engine import LLM, SamplingParams
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner

from .checkpoints import MARGIN, VOCAB, GreedyPath
from .engines import engine_config, greedy, request, run


@dataclass(frozen=True, slots=True)
class GreedyCase:
    prompt: tuple[int, ...]
    output: tuple[int, ...]


def clear_cases(
    checkpoint: Path, count: int, length: int, seed: int = 0, vocabulary: int = VOCAB
) -> list[GreedyCase]:
    """`count` random prompts with their `length` greedy tokens.

    The engine proposes; transformers confirms each path in one forward pass: every token must be
    the argmax, at least MARGIN above the second best.
    """
    llm = LLM(str(checkpoint), dtype="float32", num_blocks=4096, max_num_seqs=64)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = load(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    found: list[GreedyCase] = []
    while len(found) < count:
        prompts = [
            torch.randint(3, vocabulary, (4 + 5 * (i % 12),), generator=generator).tolist()
            for i in range(64)
        ]
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        for prompt, output in zip(prompts, outputs, strict=True):
            case = GreedyCase(tuple(prompt), tuple(output.outputs[0].token_ids))
            if _clear(model, case):
                found.append(case)
    return found[:count]


def _clear(model: Any, case: GreedyCase) -> bool:
    ids = [*case.prompt, *case.output]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, len(case.prompt) - 1 : -1].float()
    best = logits.topk(2)
    agrees: bool = best.indices[:, 0].tolist() == list(case.output)
    return agrees and bool((best.values[:, 0] - best.values[:, 1]).min() > MARGIN)


def serve(runner: ModelRunner, paths: list[GreedyPath], **options: Any) -> Engine:
    """Runs all prompts at once; checks every token, and that no block stays in use."""
    engine = Engine(engine_config(Path("unused"), **options), runner)
    requests = [
        request(str(at), path.prompt, greedy(len(path.output))) for at, path in enumerate(paths)
    ]
    outputs = run(engine, requests)
    for at, path in enumerate(paths):
        assert tuple(outputs[str(at), 0].token_ids) == path.output, f"prompt {at}"
    assert engine.stats().blocks_used == 0
    return engine
