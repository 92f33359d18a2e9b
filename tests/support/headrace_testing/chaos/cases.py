"""Requests, and the answer that each must get in spite of faults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace_testing.stack import MODEL

TOKENS = 64


@dataclass(frozen=True, slots=True)
class Expected:
    """One choice of an answer."""

    token_ids: tuple[int, ...]
    finish_reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    prompt: tuple[int, ...]
    fields: Mapping[str, Any]
    expected: tuple[Expected, ...] = field(repr=False)

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "prompt": list(self.prompt),
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
            **self.fields,
        }

    @property
    def tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.expected)


@dataclass(frozen=True, slots=True)
class Workload:
    checkpoint: Path
    cases: tuple[Case, ...]

    @property
    def tokens(self) -> int:
        return sum(case.tokens for case in self.cases)
