"""Measures the gain of one feature: the same engine with it and without it, for offline.py.

Each pair gets the workload that the feature is made for. The exception is `everything`: the cost of
all optional features on the plain workload.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

Options = Mapping[str, Any]
_NONE: Options = MappingProxyType({})
SHARED_PROMPT_TOKENS = 1024


@dataclass(frozen=True)
class Work:
    """One request: prompt ids and the number of tokens to generate."""

    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True)
class Feature:
    """`off` and `on` are options of the engine; `sampling` are those of requests with the feature
    on. `work` names one of WORKLOADS. With `tokenizer`, the model's tokenizer is loaded and decodes
    the output."""

    work: str
    on: Options
    off: Options = field(default_factory=lambda: _NONE)
    sampling: Options = field(default_factory=lambda: _NONE)
    tokenizer: bool = False


FEATURES: Mapping[str, Feature] = {
    "int8": Feature("single", {"quantization": "int8"}),
    "prefix-caching": Feature(
        "shared", {"enable_prefix_caching": True}, {"enable_prefix_caching": False}
    ),
    "ngram": Feature(
        "repetitive", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}}
    ),
    # No request has an adapter: what it costs that one could have.
    "lora": Feature("single", {"enable_lora": True}),
    "async-scheduling": Feature("mixed", {"async_scheduling": True}, {"async_scheduling": False}),
    "everything": Feature(
        "mixed",
        {"enable_prefix_caching": True, "policy": "fair"},
        {"enable_prefix_caching": False},
        {"logprobs": 5},
        tokenizer=True,
    ),
}


def mixed(requests: int, vocab_size: int, number: int) -> list[Work]:
    """Prompts of 16-512 and outputs of 16-128 tokens.

    Each round has the same lengths but other tokens, so that no cached prefix is reused.
    """
    lengths, tokens = random.Random(0), random.Random(1 + number)
    return [
        Work(
            prompt=[tokens.randrange(3, vocab_size) for _ in range(lengths.randint(16, 512))],
            output_tokens=lengths.randint(16, 128),
        )
        for _ in range(requests)
    ]


def single(_requests: int, vocab_size: int, number: int) -> list[Work]:
    """One request alone, mostly decoding."""
    tokens = random.Random(1 + number)
    return [Work([tokens.randrange(3, vocab_size) for _ in range(32)], 256)]


def shared(requests: int, vocab_size: int, number: int) -> list[Work]:
    """A long system prompt that all requests share, and a short question for each."""
    tokens = random.Random(1 + number)
    system = [tokens.randrange(3, vocab_size) for _ in range(SHARED_PROMPT_TOKENS)]
    return [
        Work([*system, *(tokens.randrange(3, vocab_size) for _ in range(32))], 16)
        for _ in range(requests)
    ]


def repetitive(_requests: int, vocab_size: int, number: int) -> list[Work]:
    """A text that repeats itself, and an output long enough to do so too."""
    tokens = random.Random(1 + number)
    phrase = [tokens.randrange(3, vocab_size) for _ in range(24)]
    return [Work(phrase * 8, 256)]


WORKLOADS = {"mixed": mixed, "single": single, "shared": shared, "repetitive": repetitive}
