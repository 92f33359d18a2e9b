"""Decoders with recurrent layers give transformers' greedy tokens through Triton: prompts whole and
in chunks, beside decodes.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace_engine.engine.engine import Engine
from headrace_engine.kernels.triton.dependent_launch import DependentLaunches
from headrace_engine.kernels.triton.launch import RecurrentLaunch, RecurrentLaunches
from headrace_engine.model_loader import loader
from headrace_engine.operators.base import TorchOps
from headrace_engine.operators.triton_recurrent import TritonRecurrences
from headrace_testing.checkpoints import Reference
from headrace_testing.engines import engine_config, greedy, make_runner, request, run

CHUNK = RecurrentLaunch(16, 16, 1, 1)
CHUNKS = RecurrentLaunches(CHUNK, CHUNK, least=(8, 8))
COMPILED = torch.cuda.is_available()
# In the interpreter the last prompt has some tokens less than in a compiled run.
LENGTH, PROMPTS = 4, (5, 60 if COMPILED else 22)
FAMILIES = (
    "qwen3-next",
    "qwen3_5",
    "mamba",
    "falcon-mamba",
    "mamba2",
    "falcon-h1-norm",
    "nemotron-h",
    "jamba",
    "lfm2",
    "kimi-linear",
)


class RecurrentOps(TorchOps):
    """Operators in torch beside recurrences through Triton."""

    def __init__(self) -> None:
        self.recurrences = TritonRecurrences(DependentLaunches(), CHUNKS)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers(
    name: str,
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = reference(name).clear_paths(len(PROMPTS), LENGTH, lambda index: PROMPTS[index])
    if not COMPILED:
        monkeypatch.setattr(loader, "make_ops", lambda *_: RecurrentOps())
    runner = make_runner(
        checkpoint(name),
        attention_backend="triton" if COMPILED else "cpu",
        device="cuda" if COMPILED else "cpu",
        threads=1,
    )
    config = engine_config(Path("unused"), max_num_batched_tokens=25, max_num_seqs=2)
    requests = [request(str(at), path.prompt, greedy(LENGTH)) for at, path in enumerate(paths)]
    outputs = run(Engine(config, runner), requests)
    for at, path in enumerate(paths):
        assert tuple(outputs[str(at), 0].token_ids) == path.output
