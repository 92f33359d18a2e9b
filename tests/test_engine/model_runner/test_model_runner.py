"""The runner: how it uses settings and memory, the contents of a batch, refusals.

The tests of models compare its tokens.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.errors import ConfigError
from headrace_engine.core.request import EngineRequest, FinishReason, Sequence
from headrace_engine.core.step_plan import SampleRow, ScheduledSequence, SchedulerOutput
from headrace_engine.engine.engine import Engine
from headrace_engine.kv_cache import memory_budget
from headrace_engine.kv_cache.memory_budget import CPU_CACHE_FACTOR, count_blocks
from headrace_engine.model_runner.input_batch import build
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_testing.checkpoints import save_checkpoint
from headrace_testing.engines import engine_config, greedy, make_runner, request, run

CPU = torch.device("cpu")
CheckpointMaker = Callable[[str], Path]


def sequence(token_ids: list[int], blocks: list[int], name: str = "r") -> Sequence:
    made = EngineRequest(
        request_id=name, prompt_token_ids=tuple(token_ids), params=SamplingParams(), seed=0
    )
    return Sequence(made, 0, token_ids, block_table=blocks)


def test_a_batch_has_the_scheduler_output_as_tensors() -> None:
    decode = sequence([10, 11, 12, 13, 14], [7, 3])
    chunk = sequence([20, 21, 22, 23, 24, 25, 26], [5, 9])
    prompt = sequence([30, 31], [1, 2])
    scheduler_output = SchedulerOutput(
        (
            ScheduledSequence(decode, 4, 1, samples=True),
            ScheduledSequence(chunk, 2, 4, samples=False),
            ScheduledSequence(prompt, 0, 2, samples=True),
        ),
        (),
        7,
    )
    batch = build(scheduler_output, 4, CPU)
    assert batch.sampling == (SampleRow(decode), SampleRow(prompt))
    forward, metadata = batch.forward, batch.forward.metadata
    assert forward.input_ids.tolist() == [14, 22, 23, 24, 25, 30, 31]
    assert forward.positions.tolist() == [4, 2, 3, 4, 5, 0, 1]
    assert forward.logits_rows.tolist() == [0, 6]
    assert metadata.query_start.tolist() == [0, 1, 5, 7]
    assert metadata.seq_lens.tolist() == [5, 6, 2]
    assert metadata.block_tables.tolist() == [[7, 3], [5, 9], [1, 0]]
    assert metadata.slots.tolist() == [12, 22, 23, 36, 37, 4, 5]
    assert (metadata.num_decodes, metadata.max_query_len, metadata.max_seq_len) == (1, 4, 6)
    kinds = [forward.input_ids, forward.positions, metadata.slots]
    assert all(tensor.dtype is torch.int64 for tensor in kinds)
    kinds = [metadata.query_start, metadata.seq_lens, metadata.block_tables]
    assert all(tensor.dtype is torch.int32 for tensor in kinds)


def test_the_runner_reports_the_values_that_the_scheduler_needs(
    checkpoint: CheckpointMaker,
) -> None:
    runner = make_runner(checkpoint("llama"), num_blocks=200, block_size=8)
    assert (runner.num_blocks, runner.block_size, runner.vocab_size) == (200, 8, 256)
    assert (runner.max_model_len, runner.eos_token_ids) == (512, frozenset({2}))


def test_warming_up_changes_no_token(checkpoint: CheckpointMaker) -> None:
    folder = checkpoint("llama")
    runner = make_runner(folder)
    requests = [request("r", tuple(range(30, 50)), greedy(6))]
    before = run(Engine(engine_config(folder), runner), requests)
    runner.warm_up()
    assert run(Engine(engine_config(folder), runner), requests) == before


def test_a_step_that_samples_nothing_gives_nothing(checkpoint: CheckpointMaker) -> None:
    runner = make_runner(checkpoint("llama"))
    step = ScheduledSequence(sequence([5, 6, 7], [0]), 0, 2, samples=False)
    assert runner.execute(SchedulerOutput((step,), (), 2)).sampled == ()


def test_copies_come_before_the_forward_pass(checkpoint: CheckpointMaker) -> None:
    runner = make_runner(checkpoint("llama"))
    tokens = [5, 6, 7, 8]
    params = SamplingParams(temperature=0.0)
    first = Sequence(request("a", tokens, params), 0, tokens, block_table=[3])
    fresh = runner.execute(
        SchedulerOutput((ScheduledSequence(first, 0, 4, samples=True),), (), 4)
    ).sampled
    other = Sequence(request("b", tokens, params), 0, tokens, block_table=[9])
    copied = runner.execute(
        SchedulerOutput((ScheduledSequence(other, 3, 1, samples=True),), ((3, 9),), 1)
    ).sampled
    assert copied == fresh


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stated", [True, False])
def test_auto_dtype_is_that_of_the_checkpoint(
    dtype: torch.dtype, stated: bool, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, "llama", dtype=dtype)
    if not stated:
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.replace('"dtype"', '"ignored"'))
    # CPUs compute float16 slowly and have no kernels for it.
    expected = torch.bfloat16 if dtype is torch.float16 else dtype
    assert make_runner(folder, dtype="auto").dtype is expected


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_run(dtype: str, name: str, checkpoint: CheckpointMaker) -> None:
    folder = checkpoint(name)
    options = {"dtype": dtype, "attention_backend": "auto"}
    engine = Engine(engine_config(folder, **options), make_runner(folder, **options))
    outputs = run(engine, [request("r", (5, 6, 7), greedy(4))])
    assert len(outputs["r", 0].token_ids) == 4


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_a_context_above_the_checkpoints_is_refused(name: str, checkpoint: CheckpointMaker) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len 600 is above .* \(512\)"):
        make_runner(checkpoint(name), max_model_len=600)


def test_a_context_that_the_cache_cannot_hold_is_refused(checkpoint: CheckpointMaker) -> None:
    with pytest.raises(ConfigError, match="max_model_len 256 needs 64 KV blocks.* for 10"):
        make_runner(checkpoint("llama"), max_model_len=256, num_blocks=10)


def test_a_default_context_is_shortened_to_fit_the_cache(checkpoint: CheckpointMaker) -> None:
    assert make_runner(checkpoint("llama"), num_blocks=10).max_model_len == 40


def test_unknown_devices_are_refused(checkpoint: CheckpointMaker) -> None:
    with pytest.raises(ConfigError, match="device 'toaster'"):
        make_runner(checkpoint("llama"), device="toaster")
    with pytest.raises(ConfigError, match="device must be auto, cpu or cuda"):
        make_runner(checkpoint("llama"), device="meta")


def test_non_finite_logits_end_only_their_own_request(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][77] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    engine = Engine(engine_config(folder), make_runner(folder))
    good, bad = request("good", (5, 6, 7), greedy(6)), request("bad", (5, 77, 7), greedy(6))
    alone = run(engine, [good])["good", 0].token_ids
    together = run(engine, [good, bad])
    assert together["good", 0].token_ids == alone
    assert together["good", 0].finish_reason == FinishReason.LENGTH
    assert together["bad", 0].token_ids == []
    assert together["bad", 0].finish_reason == FinishReason.ERROR
    assert engine.stats().blocks_used == 0


def test_kv_memory_is_measured_where_no_size_is_given(
    checkpoint: CheckpointMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_block = 2 * 2 * 4 * 2 * 16 * 4  # layers, K and V, block size, heads, head size, bytes
    monkeypatch.setattr(memory_budget, "available_memory", lambda: 2**28)
    runner = make_runner(checkpoint("llama"), num_blocks=None, max_num_seqs=512)
    largest = 2**28 * 0.9 / per_block
    assert largest / 2 < runner.num_blocks <= largest


def test_a_cpu_cache_has_no_more_blocks_than_are_useful(checkpoint: CheckpointMaker) -> None:
    options = {"num_blocks": None, "max_num_seqs": 3}
    assert make_runner(checkpoint("llama"), **options).num_blocks == 3 * 128 * CPU_CACHE_FACTOR
    options["enable_prefix_caching"] = False
    assert make_runner(checkpoint("llama"), **options).num_blocks == 3 * 128


def no_profile() -> int:
    raise AssertionError("a given size needs no profile run")


def test_a_given_size_is_used_without_a_measurement() -> None:
    given = EngineConfig(model="m", kv_cache_bytes=1000)
    assert count_blocks(given, CPU, 300, 64, no_profile) == 3
    with pytest.raises(ConfigError, match="no room for one block of 1001 bytes"):
        count_blocks(given, CPU, 1001, 64, no_profile)


def test_a_gpus_cache_leaves_room_for_a_step_and_for_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,000 bytes in total: 600 are free after the profile run, 900 may be used, a step takes
    70."""
    peaks = iter([50, 120])
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: next(peaks))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: next(peaks))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (600, 1000))
    config = EngineConfig(model="m", memory_utilization=0.9)
    assert (
        count_blocks(config, torch.device("cuda"), 10, 64, lambda: 130) == (900 - 400 - 200) // 10
    )


def test_a_containers_memory_limit_is_respected(tmp_path: Path) -> None:
    assert memory_budget.cgroup_room(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    assert memory_budget.cgroup_room(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory_budget.cgroup_room(tmp_path) == 700
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 50\n")
    assert memory_budget.cgroup_room(tmp_path) == 750


def test_available_memory_is_at_most_that_of_the_machine() -> None:
    import psutil

    assert 0 < memory_budget.available_memory() <= psutil.virtual_memory().total


def test_threads_are_set(checkpoint: CheckpointMaker) -> None:
    make_runner(checkpoint("llama"), threads=3)
    assert torch.get_num_threads() == 3


def test_a_budget_larger_than_any_sequence_can_be_profiled(checkpoint: CheckpointMaker) -> None:
    runner = ModelRunner(
        EngineConfig(
            model=str(checkpoint("llama")),
            device="cpu",
            dtype="float32",
            max_num_seqs=1,
            max_num_batched_tokens=2048,
        )
    )
    assert runner.num_blocks == 32 * CPU_CACHE_FACTOR
