"""Speculative decoding: lookup, acceptance, lengths, and an engine whose output stays the same.

Runs real tiny models; the lengths of drafts follow a clock that the test sets.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.errors import ConfigError
from headrace_engine.core.outputs import SampledToken
from headrace_engine.core.request import EngineRequest, Sequence, State
from headrace_engine.core.speculative_config import SpeculativeConfig
from headrace_engine.core.step_plan import SchedulerOutput, StepResult
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.speculative.acceptance import accept, group_by_sequence
from headrace_engine.speculative.lengths import PROBE_INTERVAL, DraftLengths
from headrace_engine.speculative.ngram import NgramProposer
from headrace_engine.speculative.step_cost_model import MEMORY, StepCostModel
from headrace_testing.engines import Output, cpu_backends, engine_config, make_runner, run
from headrace_testing.engines import request as make_request

CheckpointMaker = Callable[[str], Path]
NGRAM = SpeculativeConfig(method="ngram", prompt_lookup_min=1, adaptive=False)
# The same three tokens repeated: random models soon repeat themselves too.
PROMPT = [30, 31, 32] * 4


def sequence(tokens: list[int], name: str = "r", params: SamplingParams | None = None) -> Sequence:
    request = EngineRequest(
        request_id=name, prompt_token_ids=(1,), params=params or SamplingParams(), seed=0
    )
    return Sequence(request, 0, tokens)


def looked_up(tokens: list[int], count: int = 4, least: int = 1, most: int = 3) -> tuple[int, ...]:
    one = sequence(tokens)
    return NgramProposer(least, most).propose([(one, count)]).get(one, ())


def test_drafts_are_the_tokens_after_the_last_occurrence() -> None:
    assert looked_up([5, 6, 7, 8, 1, 5, 6, 9, 9, 2, 5, 6], count=3) == (9, 9, 2)


def test_a_longer_match_is_worth_more_than_a_later_one() -> None:
    assert looked_up([5, 6, 7, 8, 9, 7, 1, 5, 6, 7], count=2) == (8, 9)
    assert looked_up([5, 6, 7, 8, 9, 7, 1, 5, 6, 7], count=2, most=1) == (1, 5)


def test_a_repetition_at_the_end_is_drafted_again() -> None:
    assert looked_up([4, 1, 2, 3, 1, 2, 3], count=7) == (1, 2, 3, 1, 2, 3, 1)
    assert looked_up([9, 9], count=3) == (9, 9, 9)


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3], [1, 2, 1, 3]])
def test_nothing_is_proposed_where_nothing_matches(tokens: list[int]) -> None:
    assert looked_up(tokens) == ()


def test_matches_shorter_than_the_minimum_do_not_count() -> None:
    assert looked_up([5, 6, 1, 6], least=1) == (1, 6, 1, 6)
    assert looked_up([5, 6, 1, 6], least=2) == ()


def test_a_grown_index_finds_the_same_as_a_new_one() -> None:
    tokens = [(n * n) % 7 for n in range(40)] + [(n * 3) % 5 for n in range(40)]
    grown, proposer = sequence([]), NgramProposer(1, 3)
    for end in range(len(tokens)):
        grown.token_ids.extend(tokens[len(grown.token_ids) : end + end % 3])
        found = proposer.propose([(grown, 4)]).get(grown, ()) if grown.token_ids else ()
        assert found == (looked_up(grown.token_ids.copy()) if grown.token_ids else ())


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(0, 2),
)
@settings(derandomize=True, database=None, deadline=None)
def test_lookup_finds_the_last_of_the_longest_matches(
    tokens: list[int], least: int, more: int
) -> None:
    end, most, best = len(tokens), least + more, (0, 0)
    for place in range(1, end):
        length = 0
        while length < min(most, place) and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        best = max(best, (length, place))
    drafts = looked_up(tokens, 1, least, most)
    assert drafts == ((tokens[best[1]],) if best[0] >= least else ())


def test_finished_sequences_are_forgotten() -> None:
    proposer, first, second = NgramProposer(1, 2), sequence([1, 1]), sequence([2, 2])
    proposer.propose([(first, 1), (second, 1)])
    first.transition(State.FINISHED)
    proposer.propose([(second, 1)])
    assert list(proposer._indices) == [second]


def chosen(*tokens: int | None) -> tuple[SampledToken | None, ...]:
    return tuple(None if token is None else SampledToken(token) for token in tokens)


@pytest.mark.parametrize(
    ("drafts", "found", "kept"),
    [
        ((), (5,), [5]),
        ((5, 6), (5, 6, 7), [5, 6, 7]),
        ((5, 6), (5, 9, 7), [5, 9]),
        ((5, 6), (8, 6, 7), [8]),
        ((5, 6), (5, None, 7), [5]),
    ],
)
def test_drafts_are_accepted_up_to_the_first_mismatch(
    drafts: tuple[int, ...], found: tuple[int | None, ...], kept: list[int]
) -> None:
    tokens = accept(drafts, chosen(*found))
    assert tokens is not None and [token.token_id for token in tokens] == kept


def test_non_finite_logits_in_the_first_row_accept_no_drafts() -> None:
    assert accept((5,), chosen(None, 5)) is None


def test_rows_go_to_their_sequences() -> None:
    rows = chosen(1, 2, 3, 9, None)
    assert group_by_sequence([(), (2, 4), ()], rows) == (
        (SampledToken(1),),
        (SampledToken(2), SampledToken(3)),
        None,
    )
    assert group_by_sequence([(), ()], chosen(4, None)) == ((SampledToken(4),), None)


@dataclass(frozen=True)
class Costs:
    """`draft` is the seconds for a draft, None if unknown; `entry` the seconds before a sequence's
    first draft."""

    draft: float | None = 0.0
    entry: float = 0.0

    def step_seconds(self, count: int) -> float | None:
        return None if self.draft is None else self.draft * count

    def prefill_seconds(self, _sequence: Sequence) -> float:
        return self.entry


FREE = Costs()


def lengths(costs: StepCostModel, most: int = 5, adaptive: bool = True) -> DraftLengths:
    return DraftLengths(most, costs, adaptive)


def costs(*steps: tuple[int, float]) -> StepCostModel:
    found = StepCostModel()
    for tokens, seconds in steps:
        for _ in range(2):
            found.observe(tokens, seconds)
    return found


MEMORY_BOUND = ((1, 1.0), (2, 1.0), (6, 1.1), (64, 1.5), (384, 3.0))
COMPUTE_BOUND = ((1, 1.0), (6, 6.0), (64, 64.0), (384, 384.0))


def test_a_step_that_costs_the_same_for_more_tokens_gets_them() -> None:
    one = sequence([1, 1])
    assert lengths(costs(*MEMORY_BOUND)).choose([(one, 99)], 0, FREE) == [(one, 5)]


def test_no_more_is_proposed_than_the_output_can_take() -> None:
    one, full = sequence([1, 1]), sequence([1, 1])
    chooser = lengths(costs(*MEMORY_BOUND))
    assert chooser.choose([(one, 2), (full, 0)], 0, FREE) == [(one, 2)]
    always = lengths(StepCostModel(), adaptive=False)
    assert always.choose([(one, 2), (full, 0)], 0, FREE) == [(one, 2)]


def test_nothing_is_proposed_if_every_token_costs_its_share() -> None:
    batch = [(sequence([1, 1]), 99) for _ in range(64)]
    assert lengths(costs(*COMPUTE_BOUND)).choose(batch, 0, FREE) == []
    assert lengths(costs(*MEMORY_BOUND)).choose(batch, 0, FREE) != []


def test_costs_are_learned_before_anything_is_proposed() -> None:
    one = sequence([1, 1])
    assert lengths(StepCostModel()).choose([(one, 99)], 0, FREE) == []
    assert lengths(costs((1, 1.0))).choose([(one, 99)], 0, FREE) == [(one, 5)]


def test_an_expensive_draft_model_shortens_drafts() -> None:
    one = sequence([1, 1])
    chooser = lengths(costs(*MEMORY_BOUND))
    found = [
        len_of(chooser.choose([(one, 99)], 0, Costs(seconds))) for seconds in (0.0, 0.1, 0.3, 2.0)
    ]
    assert found == sorted(found, reverse=True) and found[0] == 5 and found[-1] == 0


def test_unknown_costs_are_measured_with_one_sequence() -> None:
    batch = [(sequence([1, 1]), 99) for _ in range(6)]
    chooser = lengths(costs((6, 1.0), (64, 1.5)))
    assert len(chooser.choose(batch, 0, Costs(None))) == 1
    assert len(chooser.choose(batch, 0, FREE)) == 6


def test_a_sequence_is_read_only_if_its_drafts_repay_that() -> None:
    one = sequence([1, 1])
    chooser = lengths(costs(*MEMORY_BOUND))
    # A draft saves 0.7 seconds a step over HORIZON steps, so it pays if the entry costs less than
    # 45.
    assert chooser.choose([(one, 99)], 0, Costs(entry=40.0)) == [(one, 5)]
    assert chooser.choose([(one, 99)], 0, Costs(entry=50.0)) == []


def len_of(found: list[tuple[Sequence, int]]) -> int:
    return found[0][1] if found else 0


def test_only_a_sequence_with_rejected_drafts_gets_shorter_ones() -> None:
    good, bad = sequence([1, 1], "good"), sequence([1, 1], "bad")
    chooser = lengths(costs((2, 1.0), (12, 2.6)))
    for _ in range(30):
        chooser.add(good, 5, 5)
        chooser.add(bad, 5, 0)
    found = dict(chooser.choose([(good, 99), (bad, 99)], 0, FREE))
    assert found == {good: 5}


def test_a_sequence_without_drafts_is_tried_again_now_and_then() -> None:
    bad = sequence([1, 1])
    chooser = lengths(costs((1, 1.0), (6, 2.0)))
    for _ in range(30):
        chooser.add(bad, 5, 0)
    choices = [chooser.choose([(bad, 99)], 0, FREE) for _ in range(2 * PROBE_INTERVAL)]
    assert [at for at, found in enumerate(choices, start=1) if found] == [
        PROBE_INTERVAL,
        2 * PROBE_INTERVAL,
    ]


def test_costs_follow_the_samples_but_not_outliers() -> None:
    found = costs((4, 1.0))
    found.observe(4, 90.0)
    assert found.seconds(4) == pytest.approx(1.05)
    assert found.added_seconds(4, 4) == 0.0
    found.observe(8, 3.0)
    assert found.added_seconds(4, 4) == 0.0  # a single sample may be an outlier
    found.observe(8, 3.0)
    assert found.added_seconds(4, 2) == pytest.approx((3.0 - 1.05) / 2)
    for _ in range(60):
        found.observe(4, 2.0)
    assert found.seconds(4) == pytest.approx(2.0, rel=0.01)


def test_lengths_that_were_expensive_once_are_tried_again() -> None:
    found = costs((1, 1.0), (6, 60.0))
    before = found.added_seconds(1, 5)
    for _ in range(12 * MEMORY):
        found.observe(1, 1.0)
    assert found.added_seconds(1, 5) < before * 0.8


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"method": "medusa"}, "method"),
        ({"method": "draft_model"}, "model"),
        ({"method": "ngram", "model": "m"}, "model"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_min"),
        ({"prompt_lookup_mn": 3}, "prompt_lookup_mn"),
        ({"disable_by_batch_size": 0}, "disable_by_batch_size"),
        ({"model": "m", "quantization": "int3"}, "quantization"),
    ],
)
def test_a_wrong_field_is_named(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"speculative_config\.{field} "):
        SpeculativeConfig.of(values)


def test_a_method_may_be_left_out() -> None:
    assert SpeculativeConfig.of({}).method == "ngram"
    assert SpeculativeConfig.of({"model": "small"}).method == "draft_model"
    found = SpeculativeConfig.of({"prompt_lookup_max": 1})
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == (1, 1)


class Watched:
    """A runner that records how many drafts it was given and how many tokens each step made."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.drafted = self.steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, scheduler_output: SchedulerOutput) -> StepResult:
        self.drafted += sum(len(item.drafts) for item in scheduler_output.scheduled)
        self.steps += 1
        return self._runner.execute(scheduler_output)


MIXED: tuple[SamplingParams, ...] = (
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=24, repetition_penalty=1.1, logprobs=3),
    SamplingParams(temperature=0.6, max_tokens=30, ignore_eos=True, n=3),
    SamplingParams(temperature=0.4, top_p=0.9, top_k=20, max_tokens=33, min_tokens=33),
    SamplingParams(temperature=0.0, max_tokens=50, frequency_penalty=0.05, logprobs=0),
    SamplingParams(temperature=0.3, max_tokens=50, logit_bias={31: 6.0}, stop_token_ids=[40, 41]),
)


def mixed_requests() -> list[EngineRequest]:
    return [
        make_request(f"r{index}", [*range(50, 50 + index), *PROMPT], params, seed=index)
        for index, params in enumerate(MIXED)
    ]


def decode(
    folder: Path, speculation: SpeculativeConfig | None, **options: Any
) -> tuple[dict[tuple[str, int], Output], Watched]:
    options = {"attention_backend": cpu_backends()[-1], **options}
    config = engine_config(folder, speculative_config=speculation, **options)
    ticks = count()
    runner = Watched(ModelRunner(config, clock=lambda: float(next(ticks))))
    engine = Engine(config, runner)
    return run(engine, mixed_requests()), runner


def same(found: dict[tuple[str, int], Output], expected: dict[tuple[str, int], Output]) -> None:
    """Asserts equal tokens and ends, and log probabilities that differ only by rounding."""
    assert found.keys() == expected.keys()
    for key, output in found.items():
        other = expected[key]
        assert (output.token_ids, output.finish_reason) == (other.token_ids, other.finish_reason)
        assert [one.rank for one in output.logprobs] == [one.rank for one in other.logprobs]
        values = [one.logprob for one in output.logprobs]
        assert values == pytest.approx([one.logprob for one in other.logprobs], abs=1e-4)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_lookup_changes_no_token_of_a_mixed_batch(
    checkpoint: CheckpointMaker, backend: str
) -> None:
    folder = checkpoint("llama")
    expected, plain = decode(folder, None, attention_backend=backend)
    found, watched = decode(folder, NGRAM, attention_backend=backend)
    same(found, expected)
    assert watched.drafted > 50 and watched.steps < plain.steps


@pytest.mark.parametrize(("name", "blocks"), [("qwen3", 24), ("mistral", 30)])
def test_lookup_changes_no_token_where_memory_is_short(
    checkpoint: CheckpointMaker, name: str, blocks: int
) -> None:
    """All layers of the second model have a sliding window, whose old blocks are given back."""
    folder = checkpoint(name)
    options = {"num_blocks": blocks, "max_model_len": 80, "max_num_batched_tokens": 24}
    expected, _ = decode(folder, None, **options)
    found, watched = decode(folder, NGRAM, **options)
    same(found, expected)
    assert watched.drafted > 0


def test_lengths_adapt_without_changing_a_token(checkpoint: CheckpointMaker) -> None:
    folder = checkpoint("llama")
    expected, _ = decode(folder, None)
    found, watched = decode(folder, replace(NGRAM, adaptive=True))
    same(found, expected)
    assert watched.drafted > 0


def test_a_large_batch_is_not_speculated_on(checkpoint: CheckpointMaker) -> None:
    folder = checkpoint("llama")
    _, watched = decode(folder, replace(NGRAM, disable_by_batch_size=1), max_num_seqs=8)
    _, always = decode(folder, NGRAM, max_num_seqs=8)
    assert watched.drafted < always.drafted


def test_a_resumed_request_continues_with_the_same_tokens(checkpoint: CheckpointMaker) -> None:
    folder = checkpoint("llama")
    params = SamplingParams(temperature=0.7, max_tokens=40, ignore_eos=True)
    whole = make_request("r", PROMPT, params, seed=3)
    config = engine_config(folder)
    tokens = run(Engine(config, make_runner(folder)), [whole])["r", 0].token_ids
    speculating = engine_config(folder, speculative_config=NGRAM)
    rest = replace(whole, resume=(tuple(tokens[:17]),))
    found = run(Engine(speculating, ModelRunner(speculating)), [rest])["r", 0]
    assert found.token_ids == tokens[17:]


def test_statistics_count_accepted_drafts(checkpoint: CheckpointMaker) -> None:
    config = engine_config(checkpoint("llama"), speculative_config=NGRAM)
    runner = Watched(ModelRunner(config))
    engine = Engine(config, runner)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    run(engine, [make_request("r", PROMPT, params)])
    stats = engine.stats().speculation
    assert stats is not None
    assert stats.draft_tokens == runner.drafted
    # Every step after the prefill's makes one token and those that were accepted.
    assert 60 == runner.steps + stats.accepted_tokens
    assert sum(stats.accepted_per_position) == stats.accepted_tokens
    assert list(stats.accepted_per_position) == sorted(stats.accepted_per_position, reverse=True)
    assert stats.accepted_per_position[0] <= stats.drafts
