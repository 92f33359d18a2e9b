"""Decoders that are unlike Llama give transformers' greedy tokens through Triton's kernels: of a
prompt that is computed whole, and of one in chunks beside decodes.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace_engine import attention
from headrace_engine.attention.triton import TritonBackend
from headrace_engine.engine.engine import Engine
from headrace_engine.model_loader import loader
from headrace_engine.operators.triton import TritonOps
from headrace_testing.checkpoints import UNUSUAL, Reference
from headrace_testing.engines import engine_config, greedy, make_runner, request, run

COMPILED = torch.cuda.is_available()
# The longer prompt leaves the window, and has more keys than an indexer chooses.
LENGTH, PROMPTS = 2, (5, 13)


@pytest.mark.parametrize("name", UNUSUAL)
def test_greedy_tokens_equal_transformers(
    name: str,
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = reference(name).clear_paths(len(PROMPTS), LENGTH, lambda index: PROMPTS[index])
    if not COMPILED:
        monkeypatch.setattr(attention, "select", lambda *_: TritonBackend((8, 0)))
        monkeypatch.setattr(loader, "make_ops", lambda *_: TritonOps())
    runner = make_runner(
        checkpoint(name),
        attention_backend="triton" if COMPILED else "auto",
        device="cuda" if COMPILED else "cpu",
        block_size=16,
        num_blocks=16,
    )
    config = engine_config(Path("unused"), max_num_batched_tokens=12, max_num_seqs=2)
    requests = [request(str(at), path.prompt, greedy(LENGTH)) for at, path in enumerate(paths)]
    outputs = run(Engine(config, runner), requests)
    for at, path in enumerate(paths):
        assert tuple(outputs[str(at), 0].token_ids) == path.output
