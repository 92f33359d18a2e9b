"""The kernel that samples tokens, compared with the filters in plain torch; on CPUs in Triton's
interpreter."""

import numpy as np
import torch

from headrace_common.sampling.params import SamplingParams
from headrace_engine.sampling.random_sampling import (
    BLOCK,
    make_random_sampler,
    sample_by_kernel,
    sample_row_by_row,
)
from headrace_engine.sampling.top_k_top_p import least_logit

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FILTERS = (
    SamplingParams(),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.01),
    SamplingParams(top_k=1),
    SamplingParams(top_k=40),
    SamplingParams(min_p=0.02),
    SamplingParams(top_k=300, top_p=0.5, min_p=1e-4),
    SamplingParams(top_k=100_000, top_p=0.999),
)


def scaled_logits(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, width, generator=generator)
    return (logits - logits.amax(-1, keepdim=True)).to(DEVICE)


def uniform(count: int) -> torch.Tensor:
    numbers = np.random.default_rng(7).random(count)
    return torch.from_numpy(numbers).to(DEVICE)


def test_tokens_equal_those_of_the_filters_in_torch() -> None:
    """The vocabulary spans several blocks, and every other row has many ties."""
    scaled = scaled_logits(len(FILTERS), BLOCK + 5)
    scaled[::2] = scaled[::2].round(decimals=1)
    numbers = uniform(len(FILTERS))
    expected = sample_row_by_row(scaled, FILTERS, numbers)
    assert sample_by_kernel(scaled, FILTERS, numbers).tolist() == expected.tolist()


def test_the_smallest_and_largest_random_numbers_give_kept_tokens() -> None:
    """All three tokens of a tie are kept, although top_k is 2."""
    scaled = torch.full((3, BLOCK + 400), -0.5, device=DEVICE)
    scaled[:, [3, 500, BLOCK + 96]] = 0.0
    numbers = torch.tensor([0.0, 0.5, 1.0 - 2**-53], dtype=torch.float64, device=DEVICE)
    sampled = sample_by_kernel(scaled, [SamplingParams(top_k=2)] * 3, numbers)
    assert sampled.tolist() == [3, 500, BLOCK + 96]


def test_tokens_with_zero_probability_are_never_sampled() -> None:
    scaled = torch.full((2, 50), -torch.inf, device=DEVICE)
    scaled[0, 30] = 0.0
    scaled[1, [7, 9]] = torch.tensor([0.0, -80.0], device=DEVICE)
    params = [SamplingParams(top_p=0.9999), SamplingParams(top_k=2, min_p=0.5)]
    assert sample_by_kernel(scaled, params, uniform(2)).tolist() == [30, 7]
    assert least_logit(params[0]) == -np.inf


def test_a_gpu_draws_by_the_kernel() -> None:
    assert make_random_sampler(torch.device("cuda"), deterministic=True) is sample_by_kernel
    assert make_random_sampler(torch.device("cpu"), deterministic=True) is not sample_by_kernel
