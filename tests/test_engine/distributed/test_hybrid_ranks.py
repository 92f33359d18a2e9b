"""Several ranks of decoders with recurrent layers give transformers' tokens: states in parts,
forked, computed again and from cached prefixes, with quantised weights and adapters.

Ranks here are threads with real gloo collectives.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_common.sampling.params import SamplingParams
from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.checkpoints.tensor_files import scan
from headrace_engine.core.errors import ConfigError
from headrace_engine.core.recurrent_state import StateBatch, StateRun
from headrace_engine.core.speculative_config import SpeculativeConfig
from headrace_engine.distributed import commands
from headrace_engine.engine.engine import Engine
from headrace_engine.model_loader.describe_model import describe
from headrace_testing.adapter_scenes import AdapterScene
from headrace_testing.adapters import ALL_MODULES
from headrace_testing.checkpoints import HYBRID, Reference, save_checkpoint
from headrace_testing.draft_heads import change_config
from headrace_testing.engines import Output, engine_config, greedy, make_runner, request, run
from headrace_testing.quantized import awq, compressed, save_fp8, save_quantized
from headrace_testing.rank_threads import close, make_engine

LENGTH = 6

CheckpointMaker = Callable[[str], Path]
ReferenceMaker = Callable[[str], Reference]


@pytest.mark.proves("ranks")
@pytest.mark.parametrize("name", HYBRID)
def test_greedy_tokens_equal_transformers(
    name: str, checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    """Chunks of prompts, and prompts again whose states are cached."""
    paths = reference(name).clear_paths(4, LENGTH)
    engine, runner = make_engine(
        checkpoint(name), 2, attention_backend="auto", max_num_batched_tokens=23
    )
    for turn in range(2):
        outputs = run(
            engine,
            [request(f"{turn}-{at}", path.prompt, greedy(LENGTH)) for at, path in enumerate(paths)],
        )
        found = [tuple(outputs[f"{turn}-{at}", 0].token_ids) for at in range(len(paths))]
        assert found == [path.output for path in paths]
    assert engine.stats().prefix_hit_tokens > 0
    close(runner)


def all_outputs(engine: Engine) -> dict[tuple[str, int], Output]:
    """Prompts with repetitions that n-grams find: samples that fork, and greedy ones."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=10, seed=4, n=3, ignore_eos=True),
        SamplingParams(temperature=0.7, top_p=0.9, max_tokens=10, seed=5, logprobs=3),
    ]
    prompts = [(*range(30, 36), *([60 + at, 70, 80] * 4), 60 + at) for at in range(len(params))]
    return run(
        engine,
        [
            request(str(at), prompt, one, seed=at)
            for at, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ],
    )


@pytest.mark.parametrize("speculation", [SpeculativeConfig(method="ngram", adaptive=False), None])
def test_sequences_get_the_tokens_of_one_process_after_any_events(
    speculation: SpeculativeConfig | None, checkpoint: CheckpointMaker
) -> None:
    """Preemption, forks, and drafts or steps that are submitted ahead."""
    folder = checkpoint("qwen3_5")
    options: dict[str, Any] = {
        "num_blocks": 30,
        "watermark": 0.0,
        "max_num_batched_tokens": 24,
        "speculative_config": speculation,
        "async_scheduling": speculation is None,
    }
    alone = all_outputs(Engine(engine_config(folder), make_runner(folder)))
    engine, runner = make_engine(folder, 2, **options)
    found = all_outputs(engine)
    close(runner)
    assert engine.stats().preemptions > 0
    assert {key: one.token_ids for key, one in found.items()} == {
        key: one.token_ids for key, one in alone.items()
    }


@pytest.mark.parametrize("kind", ["awq", "fp8", "compressed-tensors"])
def test_quantised_weights_are_cut(kind: str, tmp_path: Path) -> None:
    """Also those of experts in one tensor."""
    if kind == "fp8":
        folder, whole = save_fp8(tmp_path, "qwen3_5", (16, 16))
    elif kind == "awq":
        folder, whole = save_quantized(tmp_path, "qwen3_5", awq(16))
    else:
        folder, whole = save_quantized(
            tmp_path, "granite-hybrid", compressed(4, 16), shared_intermediate_size=64
        )
    found = describe(load_checkpoint(str(folder)), 2)
    assert (found.quantization, found.tensors) == (kind, len(scan(folder)))
    paths = Reference(whole).clear_paths(2, LENGTH)
    engine, runner = make_engine(folder, 2)
    outputs = run(
        engine, [request(str(at), path.prompt, greedy(LENGTH)) for at, path in enumerate(paths)]
    )
    close(runner)
    assert [tuple(outputs[str(at), 0].token_ids) for at in range(2)] == [p.output for p in paths]


DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")


@pytest.mark.parametrize(
    ("shape", "modules", "whole_experts"),
    [
        ("qwen3_5-moe", DELTA, False),
        ("jamba", ("in_proj", "x_proj", "dt_proj", "out_proj"), False),
        ("granite-hybrid", ("in_proj", "out_proj", "input_linear", "output_linear"), False),
        ("nemotron-h-latent", ("in_proj", "out_proj", "fc2_latent_proj"), True),
    ],
)
def test_adapters_are_cut(
    shape: str,
    modules: tuple[str, ...],
    whole_experts: bool,
    checkpoint: CheckpointMaker,
    tmp_path: Path,
) -> None:
    """Modules that consist of several segments, and experts in one tensor."""
    kind = {"modules": (*ALL_MODULES, *modules), "seed": 2, "experts": "joined"}
    kinds = {"a": {**kind, "peft_version": "0.19.0"}}
    scene = AdapterScene(tmp_path, checkpoint(shape), kinds)
    engine, runner = make_engine(
        scene.checkpoint,
        2,
        enable_lora=True,
        enable_expert_parallel=whole_experts,
        lora_modules={"a": str(scene.folders["a"])},
    )
    paths = {name: scene.paths(name, 2) for name in (None, "a")}
    requests = [
        replace(request(f"{name}-{at}", path.prompt, greedy(8)), lora=name)
        for name, own in paths.items()
        for at, path in enumerate(own)
    ]
    outputs = run(engine, requests)
    close(runner)
    for name, own in paths.items():
        found = [tuple(outputs[f"{name}-{at}", 0].token_ids) for at in range(2)]
        assert found == [path.output for path in own]


@pytest.mark.parametrize(
    ("name", "size", "changes", "message"),
    [
        ("qwen3-next", 4, {}, r"size 4 does not divide linear_num_key_heads \(2\)"),
        ("jamba", 2, {"mamba_expand": 1, "hidden_size": 65}, r"mamba_expand \* hidden_size \(65\)"),
        (
            "falcon-h1",
            2,
            {"mamba_rms_norm": True, "mamba_n_groups": 1},
            r"size 2 is above mamba_n_groups \(1\), and mamba_norm_before_gate",
        ),
    ],
)
def test_what_ranks_cannot_divide_is_refused(
    name: str, size: int, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, name)
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        make_engine(tmp_path, size)


def test_the_states_of_a_step_are_sent_whole() -> None:
    states = StateBatch(
        sources=torch.tensor([[3, 4], [0, 0]]),
        fresh=torch.tensor([False, True]),
        targets=torch.tensor([[3, 4], [5, 6], [7, 8]]),
        runs=[StateRun(0, 0, 1, (0,)), StateRun(1, 1, 5, (1, 2)), StateRun(1, 5, 6, ())],
    )
    numbers, packed = commands.numbers_of_states(states), commands.packed_states(states)
    assert len(packed) == commands.packed_states_length(numbers)
    found = commands.unpack_states(numbers, packed)
    assert found.runs == states.runs
    for one in ("sources", "fresh", "targets"):
        assert torch.equal(getattr(found, one), getattr(states, one))
