"""Speculation with heads that read the target's hidden states: tiny real models."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from headrace_common.sampling.params import SamplingParams
from headrace_engine import attention
from headrace_engine.core.errors import CheckpointError, ConfigError
from headrace_engine.core.request import EngineRequest, Sequence
from headrace_engine.core.speculative_config import SpeculativeConfig
from headrace_engine.core.step_plan import Drafts
from headrace_engine.cuda_graphs import mixed_steps
from headrace_engine.cuda_graphs.cuda_graphs import CaptureSizes
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.models.draft_heads.target import HeadTarget
from headrace_engine.speculative.head_proposer import HeadProposer
from headrace_testing.checkpoints import SHAPES, save_checkpoint
from headrace_testing.draft_heads import (
    EagleReference,
    MTPReference,
    change_config,
    save_eagle3,
    save_hybrid_mtp,
    save_mimo,
    save_mtp,
    save_named_mtp,
    save_perfect_mtp,
)
from headrace_testing.engines import Output, engine_config, run
from headrace_testing.engines import request as make_request
from headrace_testing.rank_threads import close, make_engine
from headrace_testing.recorded_steps import CountedReference, Replays

CheckpointMaker = Callable[[str], Path]
HeadMaker = Callable[[str], tuple[Path, MTPReference]]
Found = dict[tuple[str, int], Output]
FAMILIES = ("glm4-moe", "deepseek-v3", "deepseek-v32", "glm-moe-dsa", "glm4-moe-lite")
# Families with names of their own for the layer.
NAMED = ("mimo-v2", "ernie4_5-moe", "longcat-flash")
HYBRID = ("qwen3_5", "qwen3_5-moe", "qwen3-next")
# Shapes with the head of another shape.
LIKE_OTHERS = ("qwen3_5-multimodal", "qwen3_5-moe-multimodal", "glm-moe-dsa-shared")
# Shapes that no draft head of their own exists for, or is supported.
WITHOUT_HEAD = tuple(
    name
    for name in SHAPES
    if name not in (*FAMILIES, *NAMED, *HYBRID, *LIKE_OTHERS, "gpt2", "gpt_neox")
)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> HeadMaker:
    """A checkpoint with a random head, and the reference for its drafts, by name."""
    made: dict[str, tuple[Path, MTPReference]] = {}

    def make(name: str) -> tuple[Path, MTPReference]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, save_mtp(folder, name, own_head=name == "glm4-moe")
        return made[name]

    return make


def mtp(tokens: int = 3, **options: Any) -> SpeculativeConfig:
    options = {"adaptive": False, **options}
    return SpeculativeConfig(method="mtp", num_speculative_tokens=tokens, **options)


def engine_of(folder: Path, head: SpeculativeConfig | None, **options: Any) -> Engine:
    options = {"attention_backend": "cpu", **options}
    config = engine_config(folder, speculative_config=head, **options)
    ticks = count()
    return Engine(config, ModelRunner(config, clock=lambda: float(next(ticks))))


def decode(
    folder: Path, head: SpeculativeConfig | None, requests: list[EngineRequest], **options: Any
) -> tuple[Found, Engine]:
    engine = engine_of(folder, head, **options)
    return run(engine, requests), engine


def tokens_of(found: Found) -> dict[tuple[str, int], list[int]]:
    return {key: output.token_ids for key, output in found.items()}


def acceptance(engine: Engine) -> float:
    stats = engine.stats().speculation
    assert stats is not None and stats.draft_tokens > 0
    return stats.accepted_tokens / stats.draft_tokens


MIXED: tuple[SamplingParams, ...] = (
    SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.2, logprobs=3),
    SamplingParams(temperature=0.5, max_tokens=16, ignore_eos=True, n=3),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, max_tokens=18, min_tokens=18),
    SamplingParams(temperature=0.3, max_tokens=24, logit_bias={31: 6.0}, stop_token_ids=[40, 41]),
)


def mixed_requests() -> list[EngineRequest]:
    return [
        make_request(f"r{index}", range(30, 40 + 5 * index), params, seed=index)
        for index, params in enumerate(MIXED)
    ]


class Recorded:
    """A proposer that keeps every proposal with the tokens that it follows."""

    def __init__(self, proposer: HeadProposer) -> None:
        self._proposer = proposer
        self.proposals: list[tuple[list[int], tuple[int, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> Drafts:
        found = self._proposer.propose(wanted)
        self.proposals += [(list(each.token_ids), drafts) for each, drafts in found.items()]
        return found


def recorded(engine: Engine) -> Recorded:
    speculator = engine._speculator
    assert speculator is not None
    found = Recorded(speculator._proposer)  # type: ignore[arg-type]
    speculator._proposer = found
    return found


@pytest.mark.proves("mtp")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("backend", "budget"), [("reference", 64), ("cpu", 64), ("reference", 7)])
def test_drafts_are_those_of_the_published_head(
    heads: HeadMaker, name: str, backend: str, budget: int
) -> None:
    folder, reference = heads(name)
    engine = engine_of(folder, mtp(), attention_backend=backend, max_num_batched_tokens=budget)
    proposer = recorded(engine)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    run(engine, [make_request(f"r{n}", range(30, 41 + 7 * n), params) for n in range(2)])
    assert len(proposer.proposals) > 10
    assert max(len(drafts) for _, drafts in proposer.proposals) == 3
    reference.check(proposer.proposals)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_head_changes_no_token_of_a_mixed_batch(
    heads: HeadMaker, name: str, backend: str
) -> None:
    folder, _ = heads(name)
    requests = mixed_requests()[-2:] if backend == "reference" else mixed_requests()
    expected, _ = decode(folder, None, requests, attention_backend=backend)
    found, engine = decode(folder, mtp(), requests, attention_backend=backend)
    assert tokens_of(found) == tokens_of(expected)
    assert acceptance(engine) < 0.5


@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_of_a_head_that_is_always_right_are_accepted(name: str, tmp_path: Path) -> None:
    save_perfect_mtp(tmp_path, name)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    sampled = replace(params, temperature=0.8)
    requests = [
        make_request(f"r{n}", range(30, 35 + n), params if n % 2 else sampled, seed=n)
        for n in range(4)
    ]
    expected, _ = decode(tmp_path, None, requests)
    found, engine = decode(tmp_path, mtp(5), requests)
    assert tokens_of(found) == tokens_of(expected)
    assert acceptance(engine) == 1.0


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 26},
        {"num_blocks": 26, "swap_space": 0.01},
        {"enable_prefix_caching": False},
    ],
)
def test_short_memory_changes_no_token(heads: HeadMaker, options: dict[str, Any]) -> None:
    folder, _ = heads("glm4-moe")
    options = {"max_model_len": 90, "max_num_batched_tokens": 16, **options}
    expected, _ = decode(folder, None, mixed_requests(), **options)
    found, engine = decode(folder, mtp(), mixed_requests(), **options)
    assert tokens_of(found) == tokens_of(expected)
    assert acceptance(engine) < 0.5


def test_a_preempted_or_swapped_sequence_gets_the_same_drafts(heads: HeadMaker) -> None:
    folder, reference = heads("glm4-moe")
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    requests = [make_request(f"r{n}", range(30, 40 + n), params) for n in range(3)]
    for swap_space in (0.0, 0.01):
        options = {"num_blocks": 13, "max_model_len": 40, "swap_space": swap_space}
        engine = engine_of(folder, mtp(), **options)
        proposer = recorded(engine)
        run(engine, requests)
        stats = engine.stats()
        assert stats.swaps + stats.preemptions > 0
        reference.check(proposer.proposals)


def test_a_cached_prefix_keeps_what_the_head_has_read(heads: HeadMaker) -> None:
    folder, reference = heads("glm4-moe")
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    engine = engine_of(folder, mtp())
    proposer = recorded(engine)
    run(engine, [make_request("whole", range(30, 50), params)])
    for length in range(9, 18):
        output = run(engine, [make_request(f"r{length}", range(30, 30 + length), params)])
        assert output[f"r{length}", 0].cached_tokens == (length - 1) // 4 * 4
    reference.check(proposer.proposals)


def test_a_resumed_request_continues_with_the_same_tokens(heads: HeadMaker) -> None:
    folder, _ = heads("deepseek-v3")
    params = SamplingParams(temperature=0.7, max_tokens=40, ignore_eos=True)
    whole = make_request("r", range(30, 42), params, seed=3)
    tokens = decode(folder, None, [whole])[0]["r", 0].token_ids
    rest = replace(whole, resume=(tuple(tokens[:17]),))
    found, engine = decode(folder, mtp(), [rest])
    assert found["r", 0].token_ids == tokens[17:]
    assert acceptance(engine) < 1.0


def test_lengths_follow_measured_costs_without_changing_a_token(heads: HeadMaker) -> None:
    folder, _ = heads("glm4-moe")
    expected, _ = decode(folder, None, mixed_requests())
    found, engine = decode(folder, mtp(adaptive=True), mixed_requests())
    assert tokens_of(found) == tokens_of(expected)
    always = decode(folder, mtp(), mixed_requests())[1].stats().speculation
    stats = engine.stats().speculation
    assert stats is not None and always is not None
    assert 0 < stats.draft_tokens < always.draft_tokens


def test_the_head_shares_the_memory_of_the_kv_cache(heads: HeadMaker) -> None:
    folder, _ = heads("glm4-moe")
    sizes = {"num_blocks": None, "kv_cache_bytes": 4_000_000}
    alone = ModelRunner(engine_config(folder, **sizes))
    both = ModelRunner(engine_config(folder, speculative_config=mtp(), **sizes))
    assert both.draft_head is not None
    # Three layers and the head's fourth, which has the scratch blocks, too.
    assert both.num_blocks * 4 + both.draft_head.scratch_blocks <= alone.num_blocks * 3 + 4
    assert both.num_blocks * 4 + both.draft_head.scratch_blocks > alone.num_blocks * 3 - 8


REFUSED: tuple[dict[str, Any], ...] = (
    {"enable_lora": True},
    {"load_format": "dummy"},
    {"model_implementation": "transformers"},
    {"task": "embed"},
)


@pytest.mark.parametrize("options", REFUSED)
def test_what_heads_do_not_support_is_refused_by_name(
    heads: HeadMaker, options: dict[str, Any]
) -> None:
    folder, _ = heads("glm4-moe")
    (name,) = options
    with pytest.raises(ConfigError, match=f"method mtp does not support {name}"):
        engine_config(folder, speculative_config=mtp(), **options)


def test_ranks_do_not_share_an_eagle3_head(heads: HeadMaker, tmp_path: Path) -> None:
    folder, _ = heads("glm4-moe")
    words = "method eagle3 does not support tensor_parallel_size 2"
    with pytest.raises(ConfigError, match=words):
        engine_config(folder, speculative_config=eagle3(tmp_path), tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("name", "whole_experts"),
    [
        ("glm4-moe", False),
        ("deepseek-v3", True),
        ("glm-moe-dsa", False),
        ("glm4-moe-lite", True),
    ],
)
def test_ranks_divide_a_head(heads: HeadMaker, name: str, whole_experts: bool) -> None:
    """Prompts in chunks, preemption, and rejected drafts."""
    folder, reference = heads(name)
    options = {"max_num_batched_tokens": 24, "num_blocks": 16, "max_model_len": 48}
    requests = mixed_requests()[1:3]
    expected, _ = decode(folder, None, requests, **options)
    engine, runner = make_engine(
        folder, 2, speculative_config=mtp(), enable_expert_parallel=whole_experts, **options
    )
    check_head(engine, expected, reference, requests)
    close(runner)
    assert engine.stats().preemptions > 0


@pytest.mark.refuses("mtp")
@pytest.mark.parametrize("name", WITHOUT_HEAD)
def test_a_model_without_such_a_layer_is_refused_by_name(
    name: str, checkpoint: CheckpointMaker
) -> None:
    words = r"method mtp (supports|does not support|needs a native model, and) .*ForC"
    with pytest.raises(ConfigError, match=words):
        engine_of(checkpoint(name), mtp())


def test_a_checkpoint_without_such_a_layer_is_refused_by_name(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "glm4-moe")
    change_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers 0"):
        engine_of(tmp_path, mtp())
    change_config(tmp_path, num_nextn_predict_layers=1)
    with pytest.raises(ConfigError, match="no tensor model.layers.3.eh_proj.weight"):
        engine_of(tmp_path, mtp())


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"method": "mtp", "model": "m"}, "model"),
        ({"method": "eagle3"}, "model"),
        ({"method": "mtp", "quantization": "int8"}, "quantization"),
        ({"method": "eagle3", "model": "m", "max_model_len": 9}, "max_model_len"),
    ],
)
def test_a_wrong_field_is_named(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"speculative_config\.{field} "):
        SpeculativeConfig.of(values)


def test_families_names_for_mtp_are_accepted() -> None:
    for name in ("mtp", "deepseek_mtp", "glm4_moe_mtp"):
        found = SpeculativeConfig.of({"method": name})
        assert (found.method, found.num_speculative_tokens) == ("mtp", 1)


@pytest.fixture(scope="module")
def eagle_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=4)


def eagle3(head: Path, tokens: int = 3, **options: Any) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="eagle3",
        model=str(head),
        num_speculative_tokens=tokens,
        **{"adaptive": False, **options},
    )


@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        ("reference", {}),
        ("cpu", {}),
        ("reference", {"norm_before_residual": True, "norm_before_fc": True}),
    ],
)
def test_drafts_are_those_of_the_published_eagle3_head(
    eagle_target: Path, tmp_path: Path, backend: str, changes: dict[str, Any]
) -> None:
    reference: EagleReference = save_eagle3(tmp_path, eagle_target, **changes)
    engine = engine_of(
        eagle_target, eagle3(tmp_path), attention_backend=backend, max_num_batched_tokens=9
    )
    proposer = recorded(engine)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    run(engine, [make_request(f"r{n}", range(30, 41 + 7 * n), params) for n in range(2)])
    assert len(proposer.proposals) > 10
    reference.check(proposer.proposals)


@pytest.mark.parametrize("options", [{}, {"attention_backend": "cpu"}, {"num_blocks": 26}])
def test_an_eagle3_head_changes_no_token_of_a_mixed_batch(
    eagle_target: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    save_eagle3(tmp_path, eagle_target)
    options = {"max_model_len": 90, **options}
    expected, _ = decode(eagle_target, None, mixed_requests(), **options)
    found, engine = decode(eagle_target, eagle3(tmp_path), mixed_requests(), **options)
    assert tokens_of(found) == tokens_of(expected)
    assert acceptance(engine) < 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "eagle"}, "speculators_model_type must be eagle3"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "must be 3 ascending numbers"),
        ({"transformer_layer_config": {"hidden_size": 8}}, "hidden_size must be that of the model"),
        ({"transformer_layer_config": {"model_type": "gemma"}}, "model_type must be one of llama"),
        ({"draft_vocab_size": 99}, "d2t must have 99 whole numbers|shape"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    eagle_target: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    save_eagle3(tmp_path, eagle_target)
    change_config(tmp_path, **changes)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        engine_of(eagle_target, eagle3(tmp_path))


def test_an_eagle3_head_is_no_draft_model(eagle_target: Path, tmp_path: Path) -> None:
    save_eagle3(tmp_path, eagle_target)
    config = SpeculativeConfig(method="draft_model", model=str(tmp_path))
    with pytest.raises(ConfigError, match="set speculative_config.method eagle3"):
        engine_of(eagle_target, config)


@pytest.mark.proves("mtp")
@pytest.mark.parametrize("name", HYBRID)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_head_follows_a_model_with_recurrent_states(
    name: str, backend: str, tmp_path: Path
) -> None:
    """Rejected drafts set states back, and their tokens are computed again like a prompt."""
    reference = save_hybrid_mtp(tmp_path, name)
    options = {"attention_backend": backend, "max_num_batched_tokens": 24}
    expected, _ = decode(tmp_path, None, mixed_requests(), **options)
    engine = engine_of(tmp_path, mtp(), **options)
    check_head(engine, expected, reference)
    if backend == "cpu":  # two ranks share the head, too
        options["enable_expert_parallel"] = name != "qwen3_5"
        engine, runner = make_engine(tmp_path, 2, speculative_config=mtp(), **options)
        runner.warm_up()
        check_head(engine, expected, reference)
        close(runner)


def check_head(
    engine: Engine,
    expected: Found,
    reference: MTPReference,
    requests: list[EngineRequest] | None = None,
) -> None:
    """A head must change no token, and propose those of the reference."""
    proposer = recorded(engine)
    assert tokens_of(run(engine, requests or mixed_requests())) == tokens_of(expected)
    assert acceptance(engine) < 0.5
    proposer.proposals.clear()
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    run(engine, [make_request(f"s{n}", range(80, 91 + 7 * n), params) for n in range(2)])
    assert len(proposer.proposals) > 5
    reference.check(proposer.proposals)


def test_a_recurrent_model_without_a_head_is_refused_by_name(
    checkpoint: CheckpointMaker, eagle_target: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no tensor mtp.fc.weight"):
        engine_of(checkpoint("qwen3_5"), mtp())
    save_eagle3(tmp_path, eagle_target)
    with pytest.raises(ConfigError, match="method eagle3 does not support Qwen3_5"):
        engine_of(checkpoint("qwen3_5"), eagle3(tmp_path))


@pytest.fixture(scope="module")
def named_heads(tmp_path_factory: pytest.TempPathFactory) -> HeadMaker:
    """A checkpoint with a random head under published names, and the reference for its drafts."""
    made: dict[str, tuple[Path, MTPReference]] = {}

    def make(name: str) -> tuple[Path, MTPReference]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, save_named_mtp(folder, name)
        return made[name]

    return make


@pytest.mark.proves("mtp")
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(("backend", "ranks"), [("reference", 1), ("cpu", 1), ("cpu", 2)])
def test_a_head_under_other_names_is_the_published_one(
    named_heads: HeadMaker, name: str, backend: str, ranks: int
) -> None:
    """Prompts in chunks, preemption, cached prefixes and rejected drafts."""
    folder, reference = named_heads(name)
    options: dict[str, Any] = {"attention_backend": backend, "max_num_batched_tokens": 24}
    options |= {"num_blocks": 16, "max_model_len": 48}
    requests = mixed_requests()[:3]
    expected, _ = decode(folder, None, requests, **options)
    if ranks == 1:
        check_head(engine_of(folder, mtp(), **options), expected, reference, requests)
        return
    options["enable_expert_parallel"] = name == "mimo-v2"
    engine, runner = make_engine(folder, ranks, speculative_config=mtp(), **options)
    check_head(engine, expected, reference, requests)
    close(runner)


@pytest.mark.parametrize("name", NAMED)
def test_a_head_of_int8_weights_changes_no_token(named_heads: HeadMaker, name: str) -> None:
    folder, _ = named_heads(name)
    requests = mixed_requests()[-2:]
    expected, _ = decode(folder, None, requests, quantization="int8")
    found, engine = decode(folder, mtp(), requests, quantization="int8")
    assert tokens_of(found) == tokens_of(expected)
    assert acceptance(engine) < 0.5


@pytest.mark.parametrize("name", NAMED)
def test_a_layer_for_drafts_is_not_read_without_them(named_heads: HeadMaker, name: str) -> None:
    folder, reference = named_heads(name)
    prompt = list(range(30, 41))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    found, _ = decode(folder, None, [make_request("r", prompt, params)])
    assert found["r", 0].token_ids == [reference.next_token(prompt)]


@pytest.mark.proves("mtp", architectures=["MiMoForCausalLM"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_mimos_head_reads_states_before_the_last_norm(backend: str, tmp_path: Path) -> None:
    reference = save_mimo(tmp_path)
    options = {"attention_backend": backend, "max_num_batched_tokens": 9}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    requests = [make_request(f"r{n}", range(30, 41 + 7 * n), params) for n in range(2)]
    expected, _ = decode(tmp_path, None, requests, **options)
    engine = engine_of(tmp_path, mtp(), **options)
    proposer = recorded(engine)
    found = run(engine, requests)
    assert tokens_of(found) == tokens_of(expected)
    ids = list(range(30, 41))
    for token in found["r0", 0].token_ids:
        assert token == reference.next_token(ids)
        ids.append(token)
    assert len(proposer.proposals) > 10
    reference.check(proposer.proposals)


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_steps_that_check_drafts_are_recorded(
    method: str,
    heads: HeadMaker,
    eagle_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU, with a stand-in that runs a step again where a graph would be replayed."""
    monkeypatch.setattr(mixed_steps, "TOKENS_STEP", 8)
    reference: MTPReference | EagleReference
    if method == "mtp":
        folder, reference = heads("glm4-moe")
        head = mtp()
    else:
        folder, reference = eagle_target, save_eagle3(tmp_path, eagle_target)
        head = eagle3(tmp_path)
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 64}
    expected, _ = decode(folder, None, mixed_requests(), **options)
    monkeypatch.setattr(attention, "select", lambda *_: CountedReference())
    config = engine_config(folder, speculative_config=head, **options)
    runner = ModelRunner(config)
    target, replays = runner.model, Replays()
    assert isinstance(target, HeadTarget) and runner.draft_head is not None
    made = replace(runner._recorder, model=target.part, every_row=True)
    sizes = CaptureSizes((4,), (64,))
    graphs = made.record(sizes, made.static_batch(), replays, made.mixed_batch())
    runner.model = runner.draft_head.target = target.with_part(graphs)
    engine = Engine(config, runner)
    proposer = recorded(engine)
    assert tokens_of(run(engine, mixed_requests())) == tokens_of(expected)
    assert len([rows for rows in replays.used if rows > 4]) > 10, "decodes with drafts"
    proposer.proposals.clear()
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    run(engine, [make_request("last", range(80, 91), params)])
    reference.check(proposer.proposals)
