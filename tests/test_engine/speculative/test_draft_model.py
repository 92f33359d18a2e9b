"""Speculation with a draft model: tiny real models as target and draft."""

from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.errors import ConfigError
from headrace_engine.core.request import EngineRequest, Sequence, State
from headrace_engine.core.speculative_config import SpeculativeConfig
from headrace_engine.core.step_plan import NO_DRAFTS, Drafts, SampleRow, SchedulerOutput
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.speculative.draft_proposer import DraftModelProposer
from headrace_testing.checkpoints import Reference, save_checkpoint
from headrace_testing.engines import Output, cpu_backends, engine_config, run
from headrace_testing.engines import request as make_request

CheckpointMaker = Callable[[str], Path]
ReferenceMaker = Callable[[str], Reference]
Found = dict[tuple[str, int], Output]


@pytest.fixture(scope="module")
def similar(checkpoint: CheckpointMaker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The llama checkpoint with a little noise on its weights: it agrees most of the time."""
    folder = tmp_path_factory.mktemp("similar")
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = load(checkpoint("llama"), dtype=torch.float32)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(0.03 * parameter.std() * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def speculation(draft: Path, tokens: int = 4, **options: Any) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="draft_model",
        model=str(draft),
        num_speculative_tokens=tokens,
        adaptive=False,
        **options,
    )


def decode(
    folder: Path, draft: SpeculativeConfig | None, requests: list[EngineRequest], **options: Any
) -> tuple[Found, Engine]:
    options = {"attention_backend": cpu_backends()[-1], **options}
    config = engine_config(folder, speculative_config=draft, **options)
    ticks = count()
    engine = Engine(config, ModelRunner(config, clock=lambda: float(next(ticks))))
    return run(engine, requests), engine


def acceptance(engine: Engine) -> float:
    stats = engine.stats().speculation
    assert stats is not None and stats.draft_tokens > 0
    return stats.accepted_tokens / stats.draft_tokens


def tokens_of(found: Found) -> dict[tuple[str, int], list[int]]:
    return {key: output.token_ids for key, output in found.items()}


MIXED: tuple[SamplingParams, ...] = (
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=24, repetition_penalty=1.2, logprobs=3),
    SamplingParams(temperature=0.5, max_tokens=30, ignore_eos=True, n=3),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, max_tokens=33, min_tokens=33),
    SamplingParams(temperature=0.3, max_tokens=50, logit_bias={31: 6.0}, stop_token_ids=[40, 41]),
)


def mixed_requests() -> list[EngineRequest]:
    return [
        make_request(f"r{index}", range(30, 40 + 5 * index), params, seed=index)
        for index, params in enumerate(MIXED)
    ]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_draft_model_changes_no_token_of_a_mixed_batch(
    checkpoint: CheckpointMaker, similar: Path, backend: str
) -> None:
    folder = checkpoint("llama")
    expected, _ = decode(folder, None, mixed_requests(), attention_backend=backend)
    found, engine = decode(
        folder, speculation(similar), mixed_requests(), attention_backend=backend
    )
    assert tokens_of(found) == tokens_of(expected)
    assert 0.3 < acceptance(engine) < 1.0


def test_a_draft_model_that_is_the_target_is_always_right(checkpoint: CheckpointMaker) -> None:
    folder = checkpoint("llama")
    found, engine = decode(folder, speculation(folder), mixed_requests())
    expected, _ = decode(folder, None, mixed_requests())
    assert tokens_of(found) == tokens_of(expected)
    # The target generates nothing after a stop token, and penalties do not see later drafts; all
    # other drafts are accepted.
    assert acceptance(engine) > 0.95


def test_a_draft_model_that_knows_nothing_costs_only_time(
    checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    folder = checkpoint("llama")
    other = save_checkpoint(tmp_path, "qwen3", seed=9)
    found, engine = decode(folder, speculation(other), mixed_requests())
    expected, _ = decode(folder, None, mixed_requests())
    assert tokens_of(found) == tokens_of(expected)
    assert acceptance(engine) < 0.3


@pytest.mark.parametrize("options", [{"num_blocks": 26}, {"enable_prefix_caching": False}])
def test_short_memory_changes_no_token(
    checkpoint: CheckpointMaker, similar: Path, options: dict[str, Any]
) -> None:
    folder = checkpoint("llama")
    options = {"max_model_len": 90, "max_num_batched_tokens": 16, **options}
    found, engine = decode(folder, speculation(similar), mixed_requests(), **options)
    expected, _ = decode(folder, None, mixed_requests(), **options)
    assert tokens_of(found) == tokens_of(expected)
    assert acceptance(engine) > 0.2


def test_tokens_are_distributed_as_the_target_says(
    checkpoint: CheckpointMaker, reference: ReferenceMaker, similar: Path
) -> None:
    """Chi-square over pairs of the second and third token, both of which were drafted."""
    folder, prompt, top = checkpoint("llama"), [30, 31, 32], 3
    params = SamplingParams(temperature=1.0, top_k=top, max_tokens=3, ignore_eos=True)
    requests = [make_request(f"r{seed}", prompt, params, seed=seed) for seed in range(900)]
    found, engine = decode(
        folder, speculation(similar, 2), requests, max_num_batched_tokens=256, max_num_seqs=64
    )
    assert 0.2 < acceptance(engine) < 0.97
    seen = Counter(tuple(output.token_ids) for output in found.values())
    expected = joint(reference("llama"), prompt, top)
    assert set(seen) <= set(expected)
    total = len(requests)
    likely = {path: p * total for path, p in expected.items() if p * total >= 5}
    rest = total - sum(likely.values())
    chi2 = sum((seen[path] - mean) ** 2 / mean for path, mean in likely.items())
    unlikely = total - sum(seen[path] for path in likely)
    chi2 += (unlikely - rest) ** 2 / max(rest, 1.0)
    cells = len(likely)
    # The 0.999 quantile of chi-square by Wilson and Hilferty's approximation.
    limit = cells * (1 - 2 / (9 * cells) + 3.09 * (2 / (9 * cells)) ** 0.5) ** 3
    assert chi2 < limit


def joint(model: Reference, prompt: list[int], top: int) -> dict[tuple[int, ...], float]:
    """The probability of each path of three tokens, `top` candidates at each."""
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for path, p in paths.items():
            values, ids = model.logits([*prompt, *path])[-1].topk(top)
            for token, share in zip(ids.tolist(), values.softmax(-1).tolist(), strict=True):
                longer[(*path, token)] = p * share
        paths = longer
    return paths


class FakeDrafter:
    """Predicts n after the token n - 1, and checks that it never gets a question about tokens it
    has not seen."""

    block_size = 4
    vocab_size = 100

    def __init__(self, num_blocks: int = 16, max_model_len: int = 64) -> None:
        self.num_blocks, self.max_model_len = num_blocks, max_model_len
        self.lengths: list[list[int]] = []
        self._kv = np.full((num_blocks, self.block_size), -1)

    def execute(
        self, scheduler_output: SchedulerOutput, rows: tuple[SampleRow, ...]
    ) -> tuple[int | None, ...]:
        for source, destination in scheduler_output.copies:
            self._kv[destination] = self._kv[source]
        self.lengths.append([item.length for item in scheduler_output.scheduled])
        for item in scheduler_output.scheduled:
            tokens, table = item.sequence.token_ids, item.sequence.block_table
            end = item.start + item.length
            assert end <= self.max_model_len
            for position in range(item.start, end):
                slot = table[position // self.block_size], position % self.block_size
                self._kv[slot] = tokens[position]
            assert self._kv[table].reshape(-1)[:end].tolist() == tokens[:end]
        assert len(rows) == sum(item.samples for item in scheduler_output.scheduled)
        return tuple([*row.token_ids][-1] + 1 for row in rows)


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(make_request("r", tokens[:1], SamplingParams()), 0, tokens)


def proposer(drafter: FakeDrafter, budget: int = 64) -> DraftModelProposer:
    return DraftModelProposer(drafter, budget, clock=lambda: 0.0)


def test_a_draft_model_sees_each_token_once() -> None:
    drafter = FakeDrafter()
    one, given = sequence([1, 2, 3, 4, 5]), proposer(drafter)
    assert given.propose([(one, 3)]) == {one: (6, 7, 8)}
    assert drafter.lengths == [[5], [1], [1]]
    one.token_ids += [6, 7, 30]  # two drafts were accepted
    assert given.propose([(one, 2)]) == {one: (31, 32)}
    assert drafter.lengths[3:] == [[1], [1]]
    one.token_ids += [31, 32, 33]  # all were accepted; the draft model never computed the last one
    assert given.propose([(one, 2)]) == {one: (34, 35)}
    assert drafter.lengths[5:] == [[2], [1]]


def test_tokens_decoded_without_drafts_are_computed_later() -> None:
    drafter = FakeDrafter()
    one, given = sequence([1, 2, 3]), proposer(drafter)
    given.propose([(one, 4)])
    one.token_ids += [50, 51, 52, 53, 54]
    assert given.propose([(one, 2)]) == {one: (55, 56)}
    assert drafter.lengths[-2:] == [[5], [1]]


def test_a_long_prompt_is_computed_in_several_rounds() -> None:
    drafter = FakeDrafter()
    long, short, given = sequence(list(range(1, 30))), sequence([40]), proposer(drafter, budget=10)
    found: list[Drafts] = [given.propose([(long, 1), (short, 1)]) for _ in range(4)]
    assert [set(drafts) for drafts in found[:3]] == [{short}, {short}, {short}]
    assert found[3] == {long: (30,), short: (41,)}
    assert max(sum(lengths) for lengths in drafter.lengths) <= 10


def test_a_shared_prompt_is_prefilled_once() -> None:
    drafter = FakeDrafter()
    prompt = list(range(1, 14))
    first, second = sequence(prompt.copy()), sequence([*prompt, 50])
    given = proposer(drafter)
    given.propose([(first, 1)])
    given.propose([(first, 1)])
    given.propose([(second, 1)])
    assert drafter.lengths[-1] == [2]


def test_a_sequence_preempted_during_drafting_is_drafted_again() -> None:
    prompt = list(range(1, 9))
    first, second = sequence(prompt.copy()), sequence(prompt.copy())
    given = proposer(FakeDrafter())
    for _ in range(3):
        assert given.propose([(first, 3), (second, 3)]) == dict.fromkeys(
            (first, second), (9, 10, 11)
        )


def test_drafts_end_with_the_context_of_the_draft_model() -> None:
    given = proposer(FakeDrafter(max_model_len=8))
    near, over = sequence([1, 2, 3, 4, 5, 6, 7]), sequence([1] * 9)
    assert given.propose([(near, 5), (over, 5)]) == {near: (8, 9)}


def test_a_sequence_with_a_token_that_the_draft_model_lacks_gets_none() -> None:
    given, foreign, other = proposer(FakeDrafter()), sequence([1, 150]), sequence([7])
    for _ in range(2):
        assert given.propose([(foreign, 2), (other, 2)]) == {other: (8, 9)}
        foreign.token_ids.append(3)


def test_idle_sequences_give_up_their_blocks_and_finished_ones_do_at_once() -> None:
    drafter = FakeDrafter(num_blocks=4)
    given = proposer(drafter)
    first, second = sequence([1] * 9), sequence([2] * 9)
    assert set(given.propose([(first, 1)])) == {first}
    assert set(given.propose([(second, 1)])) == {second}
    assert given.propose([(first, 1), (second, 1)]).keys() == {second}
    second.transition(State.FINISHED)
    assert set(given.propose([(first, 1)])) == {first}
    first.transition(State.FINISHED)
    assert given.propose([]) == NO_DRAFTS
    assert given.kv_cache.pool.num_used == 0


def test_another_vocabulary_is_refused(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    folder = checkpoint("llama")
    (tmp_path / "larger").mkdir()
    larger = save_checkpoint(tmp_path / "larger", "llama", vocab_size=4000)
    with pytest.raises(ConfigError, match="same vocabulary"):
        decode(folder, speculation(larger), [])
    text = (larger / "tokenizer.json").read_text()
    (larger / "tokenizer.json").write_text(text.replace('"a":', '"å":', 1))
    with pytest.raises(ConfigError, match="another vocabulary"):
        decode(folder, speculation(larger), [])


@pytest.mark.parametrize("vocab_size", [252, 300])
def test_a_vocabulary_may_have_another_padding(
    checkpoint: CheckpointMaker, tmp_path: Path, vocab_size: int
) -> None:
    folder = checkpoint("llama")
    other = save_checkpoint(tmp_path, "llama", vocab_size=vocab_size)
    params = SamplingParams(
        temperature=1.5, max_tokens=40, ignore_eos=True, logit_bias={254: 3.0, 255: 3.0}
    )
    requests = [make_request(f"r{seed}", [30, 31], params, seed=seed) for seed in range(4)]
    found, engine = decode(folder, speculation(other), requests)
    expected, _ = decode(folder, None, requests)
    assert tokens_of(found) == tokens_of(expected)
    assert any(token >= 252 for tokens in tokens_of(found).values() for token in tokens)
    assert engine.stats().speculation is not None


def test_kv_memory_is_shared_out_between_both_models(checkpoint: CheckpointMaker) -> None:
    folder = checkpoint("llama")
    plain = engine_config(folder, num_blocks=None, kv_cache_bytes=4_000_000)
    both = engine_config(
        folder,
        num_blocks=None,
        kv_cache_bytes=4_000_000,
        speculative_config=speculation(folder),
    )
    alone, shared = ModelRunner(plain), ModelRunner(both)
    assert shared.draft_model is not None and shared.draft_model.num_blocks == shared.num_blocks
    assert shared.num_blocks == alone.num_blocks // 2
