"""Every family gives transformers' greedy tokens however its requests are scheduled: in chunks,
under preemption, after prefix hits on every block border, with forks, resumed and after drafts.

Left out: devices other than the CPU.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headrace_engine.core.speculative_config import SpeculativeConfig
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_testing.checkpoints import HYBRID, UNUSUAL, GreedyPath, Reference
from headrace_testing.engines import (
    cpu_backends,
    engine_config,
    greedy,
    make_runner,
    request,
    run,
)
from headrace_testing.greedy import serve

LENGTH = 8
NGRAM = SpeculativeConfig(
    method="ngram", prompt_lookup_min=1, num_speculative_tokens=3, adaptive=False
)
BACKEND = cpu_backends()[-1]

CheckpointMaker = Callable[[str], Path]
ReferenceMaker = Callable[[str], Reference]


@pytest.fixture(scope="module", params=(*UNUSUAL, *HYBRID))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def paths(name: str, reference: ReferenceMaker) -> list[GreedyPath]:
    return reference(name).clear_paths(8, LENGTH)


@pytest.fixture(scope="module")
def runner(name: str, checkpoint: CheckpointMaker) -> ModelRunner:
    return make_runner(checkpoint(name), attention_backend=BACKEND, threads=1)


@pytest.mark.proves("tokens")
@pytest.mark.parametrize("chunk", [1, 3, 16, 64, 512])
def test_greedy_tokens_equal_transformers(
    chunk: int, runner: ModelRunner, paths: list[GreedyPath]
) -> None:
    assert len({path.output for path in paths}) > 4, "the model must not ignore its prompt"
    # One token at a time, each prompt takes many steps, and nothing is gained by more of them.
    served = [paths[1], paths[3]] if chunk < 16 else paths
    serve(runner, served, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 8))


def test_preempted_sequences_continue_with_the_same_tokens(
    name: str, runner: ModelRunner, checkpoint: CheckpointMaker, paths: list[GreedyPath]
) -> None:
    groups = runner.kv_groups
    longest = max(len(path.prompt) for path in paths) + LENGTH
    blocks = groups.blocks(longest, runner.block_size) + 8 + 3 * groups.state
    small = make_runner(checkpoint(name), attention_backend=BACKEND, threads=1, num_blocks=blocks)
    engine = serve(small, paths, max_num_batched_tokens=32, watermark=0.0)
    # The memory for a sequence of a model without KV does not grow.
    grows = groups.full > 0
    assert bool(engine.stats().preemptions) == grows


def test_prefix_hits_on_every_block_border_change_no_token(
    runner: ModelRunner, name: str, reference: ReferenceMaker
) -> None:
    """A recurrent model's prompt leaves a snapshot at its last block border; later prompts begin
    there."""
    prefix, size = tuple(range(10, 43)), runner.block_size
    shared = [prefix[: blocks * size] for blocks in range(1, 9)]
    paths = reference(name).clear_paths(8, 4, lambda _: 6, lambda index: shared[index])
    engine = Engine(engine_config(Path("unused")), runner)
    for begin, path in zip(shared, paths, strict=True):
        run(engine, [request("first", (*begin, 5), greedy(1))])
        found = run(engine, [request("next", path.prompt, greedy(4))])["next", 0]
        assert tuple(found.token_ids) == path.output
        assert found.cached_tokens == len(begin)


def test_forked_choices_give_the_same_tokens(runner: ModelRunner, paths: list[GreedyPath]) -> None:
    engine = Engine(engine_config(Path("unused")), runner)
    requests = [request(str(at), path.prompt, greedy(LENGTH, n=2)) for at, path in enumerate(paths)]
    outputs = run(engine, requests)
    for at, path in enumerate(paths):
        for choice in range(2):
            assert tuple(outputs[str(at), choice].token_ids) == path.output


def test_another_engine_continues_with_the_same_tokens(
    runner: ModelRunner, paths: list[GreedyPath]
) -> None:
    """It gets the prompt, and the tokens that the client received from an engine that died."""
    engine = Engine(engine_config(Path("unused")), runner)
    requests = [
        replace(request(str(at), path.prompt, greedy(LENGTH)), resume=(path.output[: 1 + at],))
        for at, path in enumerate(paths)
    ]
    outputs = run(engine, requests)
    for at, path in enumerate(paths):
        assert tuple(outputs[str(at), 0].token_ids) == path.output[1 + at :]


def test_rejected_drafts_leave_no_trace(runner: ModelRunner, paths: list[GreedyPath]) -> None:
    engine = serve(runner, paths, speculative_config=NGRAM)
    speculation = engine.stats().speculation
    assert speculation is not None
    assert speculation.draft_tokens > speculation.accepted_tokens
