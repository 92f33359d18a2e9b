"""Decoders with recurrent layers give transformers' greedy tokens through Triton: prompts whole and
in chunks, beside decodes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_engine.engine.engine import Engine
from headrace_engine.kernels.triton.dependent_launch import DependentLaunches
from headrace_engine.kernels.triton.launch import RecurrentLaunch, RecurrentLaunches
from headrace_engine.layers.expert_weights import MixtureParts
from headrace_engine.model_loader import loader
from headrace_engine.models.hybrid.decoder import HybridDecoder
from headrace_engine.operators.base import TorchOps
from headrace_engine.operators.triton_experts import GroupedMoe
from headrace_engine.operators.triton_recurrent import TritonRecurrences
from headrace_testing.checkpoints import Reference, save_checkpoint
from headrace_testing.engines import engine_config, greedy, make_runner, request, run

COMPILED = torch.cuda.is_available()
# The interpreter is slow: chunks, prompts and models are small. The last prompt is cut by a chunk
# and by a step.
CHUNK = RecurrentLaunch(8, 16, 1, 1)
CHUNKS = RecurrentLaunches(CHUNK, CHUNK, least=(8, 8))
LENGTH, PROMPTS, BUDGET = 4, (5, 60 if COMPILED else 14), 25 if COMPILED else 17
LINEAR = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
CONVOLUTIONS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
# How the models differ from those of other tests: each has two recurrent layers.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3-next": LINEAR,
    "qwen3_5": LINEAR,
    "mamba": {"num_hidden_layers": 2},
    "falcon-mamba": {"num_hidden_layers": 2},
    "mamba2": {"num_hidden_layers": 2},
    "falcon-h1-norm": {},
    "nemotron-h": {},
    "jamba": {"num_hidden_layers": 3},
    "lfm2": CONVOLUTIONS,
    "lfm2-moe": CONVOLUTIONS,
    "granite-hybrid": LINEAR,
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "qwen3_5-moe": LINEAR,
    "kimi-linear": {**LINEAR, "linear_num_heads": 2},
}


class RecurrentOps(TorchOps):
    """Operators in torch beside recurrences through Triton."""

    def __init__(self) -> None:
        self.recurrences = TritonRecurrences(DependentLaunches(), CHUNKS)


class MixtureOps(RecurrentOps):
    """The same with mixtures through Triton."""

    def mixture(self, parts: MixtureParts) -> GroupedMoe:
        return GroupedMoe(parts, capability=(8, 0))


@pytest.mark.parametrize(("name", "published"), [("lfm2-moe", True), ("qwen3_5-moe", False)])
def test_all_experts_are_computed_at_once(
    name: str, published: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that are stored one by one, and those that are one tensor."""
    if not COMPILED:
        monkeypatch.setattr(loader, "make_ops", lambda *_: MixtureOps())
    save_checkpoint(tmp_path, name, published=published, **FAMILIES[name])
    (path,) = Reference(tmp_path).clear_paths(1, 2, lambda _: 5)
    runner = make_runner(
        tmp_path,
        attention_backend="triton" if COMPILED else "cpu",
        device="cuda" if COMPILED else "cpu",
        threads=1,
    )
    assert isinstance(runner.model, HybridDecoder)
    last: Any = runner.model._weights.parts[-1].layer
    assert isinstance(last.feed_forward, GroupedMoe)
    output = run(
        Engine(engine_config(Path("unused")), runner), [request("r", path.prompt, greedy(2))]
    )
    assert tuple(output["r", 0].token_ids) == path.output


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, name, **FAMILIES[name])
    paths = Reference(tmp_path).clear_paths(len(PROMPTS), LENGTH, lambda index: PROMPTS[index])
    if not COMPILED:
        monkeypatch.setattr(loader, "make_ops", lambda *_: RecurrentOps())
    runner = make_runner(
        tmp_path,
        attention_backend="triton" if COMPILED else "cpu",
        device="cuda" if COMPILED else "cpu",
        threads=1,
    )
    config = engine_config(Path("unused"), max_num_batched_tokens=BUDGET, max_num_seqs=2)
    requests = [request(str(at), path.prompt, greedy(LENGTH)) for at, path in enumerate(paths)]
    outputs = run(Engine(config, runner), requests)
    for at, path in enumerate(paths):
        assert tuple(outputs[str(at), 0].token_ids) == path.output
