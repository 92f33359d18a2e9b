"""The sampler, compared with a simple row-by-row computation in numpy, and its random numbers.

Statistics are exact: the sampled token as a function of the uniform number is the inverse of the
distribution function, so a grid of numbers recovers every probability.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.outputs import SampledToken
from headrace_engine.core.request import EngineRequest, Sequence
from headrace_engine.core.step_plan import SampleRow
from headrace_engine.operators.base import TorchOps
from headrace_engine.sampling.rng import uniforms
from headrace_engine.sampling.sampler import Sampler
from headrace_engine.sampling.top_k_top_p import NUCLEUS_CANDIDATES, sample_tokens, thresholds

EOS = 3
Row = npt.NDArray[np.float64]


def sequence(
    params: SamplingParams,
    *,
    prompt: tuple[int, ...] = (1, 2, 2),
    output: tuple[int, ...] = (),
    seed: int = 0,
    choice: int = 0,
    name: str = "r",
) -> Sequence:
    request = EngineRequest(
        request_id=name, prompt_token_ids=prompt, params=params, seed=seed, resume=()
    )
    return Sequence(request, choice, [*prompt, *output])


def sample(logits: torch.Tensor, *sequences: Sequence) -> list[int]:
    return [one.token_id for one in whole(logits, *sequences)]


def whole(logits: torch.Tensor, *sequences: Sequence) -> list[SampledToken]:
    """All samples, after checking that no row is broken."""
    rows = [SampleRow(one) for one in sequences]
    result = Sampler(frozenset({EOS}), TorchOps()).sample(logits.clone(), rows)
    tokens = [one for one in result if one is not None]
    assert len(tokens) == len(sequences)
    return tokens


def adjusted(logits: Row, one: Sequence) -> Row:
    """vLLM's definitions, in plain loops."""
    params, row = one.request.params, logits.copy()
    prompt, output = one.token_ids[: one.prompt_length], one.token_ids[one.prompt_length :]
    if len(output) < params.min_tokens:
        for token in {EOS, *params.stop_token_ids}:
            row[token] = -np.inf
    for token, bias in params.logit_bias.items():
        row[token] += bias
    for token in set(prompt) | set(output):
        penalty = params.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token in set(output):
        row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return row


def probabilities(logits: Row, one: Sequence) -> Row:
    """The filtered distribution: min_p, then top_k, then top_p over what is left."""
    params = one.request.params
    row = adjusted(logits, one) / params.temperature
    p = np.exp(row - row.max())
    p[p < params.min_p * p.max()] = 0.0
    if 0 < params.top_k < len(p):
        p[p < np.sort(p)[-params.top_k]] = 0.0
    if params.top_p < 1.0:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        kept = order[before < params.top_p * p.sum()]
        p[p < p[kept].min()] = 0.0
    result: Row = p / p.sum()
    return result


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "large top_k": {"top_k": 400},
    "top_p": {"top_p": 0.6},
    "wide top_p": {"top_p": 0.999, "temperature": 5.0},
    "tiny top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.2},
    "all filters": {"min_p": 0.01, "top_k": 20, "top_p": 0.8, "temperature": 1.5},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9, "presence_penalty": -0.4},
    "bias": {"logit_bias": {7: 5.0, 9: -100.0}},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": [5, 6]},
    "everything": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.001,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {11: 1.0},
        "min_tokens": 9,
    },
}


def random_logits(rows: int, vocab: int = 600, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def make_params(name: str, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=64, **{**OPTIONS[name], **more})


@pytest.mark.parametrize("name", OPTIONS)
def test_sampled_tokens_invert_the_exact_distribution(name: str) -> None:
    """For many seeds: u lies in the token's interval of the distribution function."""
    count = 400
    logits = random_logits(1).expand(count, -1)
    rows = [sequence(make_params(name), output=(7, 7, 12, 30), seed=seed) for seed in range(count)]
    tokens = sample(logits, *rows)
    p = probabilities(logits[0].double().numpy(), rows[0])
    high = np.cumsum(p)
    u = uniforms(list(range(count)), [0] * count, [4] * count)
    for token, number in zip(tokens, u, strict=True):
        assert p[token] > 0
        assert high[token] - p[token] - 1e-6 <= number <= high[token] + 1e-6


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_takes_the_most_likely_adjusted_token(name: str) -> None:
    logits = random_logits(5, seed=3)
    row = sequence(make_params(name, temperature=0.0), output=(7, 7, 12, 30))
    found = sample(logits, *[row] * 5)
    assert found == [int(adjusted(one.double().numpy(), row).argmax()) for one in logits]


def test_rows_of_one_batch_are_independent() -> None:
    logits = random_logits(2 * len(OPTIONS), seed=1)
    params = [make_params(name, **more) for name in OPTIONS for more in ({}, {"temperature": 0.0})]
    rows = [
        sequence(one, output=(7, 8, 7), seed=index, choice=index % 3)
        for index, one in enumerate(params)
    ]
    together = sample(logits, *rows)
    assert together == [sample(logits[i : i + 1], row)[0] for i, row in enumerate(rows)]
    backwards = sample(logits.flip(0), *rows[::-1])
    assert backwards[::-1] == together


def test_a_nucleus_beyond_the_sorted_candidates_is_found() -> None:
    vocab = 4 * NUCLEUS_CANDIDATES
    params = [SamplingParams(top_p=0.5), SamplingParams(top_p=0.001)]
    flat = torch.linspace(-0.001, 0.0, vocab).expand(2, -1).contiguous()
    lowest = thresholds(flat, params)
    assert lowest is not None
    kept = (flat >= lowest[:, None]).sum(-1).tolist()
    assert abs(kept[0] - vocab // 2) <= 1 and kept[1] <= 2


def test_without_filters_nothing_is_sorted() -> None:
    assert thresholds(random_logits(2), [SamplingParams(), SamplingParams(top_k=600)]) is None


def test_the_draw_recovers_every_probability() -> None:
    p = torch.tensor([[0.5, 0.0, 0.25, 0.125, 0.125]])
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    sampled = sample_tokens(p.log().expand(1000, -1) - p.log().max(), None, grid)
    assert torch.bincount(sampled, minlength=5).tolist() == [500, 0, 250, 125, 125]


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2**-53])
def test_the_ends_of_the_interval_give_tokens_that_are_kept(number: float) -> None:
    scaled = torch.full((1, 1000), -0.5)
    scaled[0, [3, 500, 996]] = 0.0
    lowest = torch.tensor([-0.1])
    token = int(sample_tokens(scaled, lowest, torch.tensor([number], dtype=torch.float64)))
    assert token == {0.0: 3, 0.5: 500}.get(number, 996)


def test_a_random_number_depends_only_on_seed_choice_and_position() -> None:
    seeds, choices, positions = [5, 5, 5, 6, -5], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0]
    numbers = uniforms(seeds, choices, positions)
    assert len(set(numbers.tolist())) == 5
    assert numbers[::-1].tolist() == uniforms(seeds[::-1], choices[::-1], positions[::-1]).tolist()
    # Pinned: a stream that moves between releases must continue with the same tokens.
    assert uniforms([0], [0], [0]).tolist() == [0.13870941014555427]


def test_numbers_are_uniform_over_each_counter() -> None:
    count, bins = 100_000, 20
    numbers, zeros = list(range(count)), [0] * count
    for arguments in ((numbers, zeros, zeros), (zeros, numbers, zeros), (zeros, zeros, numbers)):
        drawn = uniforms(*arguments)
        assert drawn.min() >= 0.0 and drawn.max() < 1.0
        counts = np.bincount((drawn * bins).astype(int), minlength=bins)
        chi_square = float(((counts - count / bins) ** 2 / (count / bins)).sum())
        assert chi_square < 50, "19 degrees of freedom: 50 is beyond one in ten thousand"
        assert abs(float(np.corrcoef(drawn[:-1], drawn[1:])[0, 1])) < 0.02


def test_log_probabilities_are_the_models_own() -> None:
    logits = random_logits(3, seed=9)
    exact = logits.double().log_softmax(-1)
    params = [
        make_params("everything", logprobs=3),
        make_params("plain"),
        make_params("bias", logprobs=0, temperature=0.0),
    ]
    found = whole(logits, *[sequence(one, output=(7,), seed=4) for one in params])
    assert found[1].logprobs is None
    for row, count in ((0, 3), (2, 0)):
        logprobs = found[row].logprobs
        assert logprobs is not None
        chosen = float(exact[row, found[row].token_id])
        assert logprobs.logprob == pytest.approx(chosen, abs=1e-5)
        assert logprobs.rank == 1 + int((exact[row] > chosen).sum())
        best = exact[row].topk(count) if count else None
        assert [token for token, _ in logprobs.top] == (best.indices.tolist() if best else [])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_give_no_token_and_leave_the_other_rows_alone(
    value: float, temperature: float
) -> None:
    logits = random_logits(4)
    rows = [sequence(SamplingParams(temperature=temperature), name=name) for name in "abcd"]
    unbroken = sample(logits, *rows)
    logits[1, 17] = value
    logits[3, 0] = value
    tokens = Sampler(frozenset({EOS}), TorchOps()).sample(logits, [SampleRow(row) for row in rows])
    assert [token and token.token_id for token in tokens] == [unbroken[0], None, unbroken[2], None]


def test_tokens_that_a_model_rules_out_are_not_an_error() -> None:
    logits = torch.full((2, 10), -torch.inf)
    logits[:, 4] = 1.0
    rows = [sequence(SamplingParams()), sequence(SamplingParams(temperature=0.0))]
    assert sample(logits, *rows) == [4, 4]


def test_masking_every_token_is_an_error_not_garbage() -> None:
    params = SamplingParams(min_tokens=4, stop_token_ids=list(range(10)))
    assert Sampler(frozenset(), TorchOps()).sample(
        random_logits(1, vocab=10), [SampleRow(sequence(params))]
    ) == (None,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_widened_first(dtype: torch.dtype) -> None:
    logits = random_logits(4, seed=6).to(dtype)
    rows = [sequence(make_params("all filters"), seed=seed) for seed in range(4)]
    assert sample(logits, *rows) == sample(logits.float(), *rows)
