"""A grammar over the fake runner's vocabulary: the allowed next tokens depend on all output so far.

Its matcher stands in for llguidance's; cursors and masks are the engine's own.
"""

import ctypes
from collections.abc import Sequence as Tokens
from typing import Any, cast

import torch

from headrace_engine.core.compiled_grammar import CompiledGrammar
from headrace_engine.core.step_plan import SampleRow
from headrace_engine.structured_output.masks import apply_grammars

BITS = 32


def allows(output: Tokens[int], token: int) -> bool:
    """Whether `token` may follow the output: three of four tokens may, depending on a sum over the
    output."""
    return token % 4 != _refused(output)


def refused_tokens(output: Tokens[int], vocab_size: int) -> range:
    """The tokens that may not follow the output."""
    return range(_refused(output), vocab_size, 4)


def _refused(output: Tokens[int]) -> int:
    return -(sum(output) + 3 * len(output)) % 4


class FakeMatcher:
    """The part of llguidance's LLMatcher that the engine uses."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._read: list[int] = []

    def deep_copy(self) -> "FakeMatcher":
        return FakeMatcher(self._vocab_size)

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Reads tokens up to the first that is not allowed; returns how many it read."""
        for count, token in enumerate(tokens):
            if not allows(self._read, token):
                return count
            self._read.append(token)
        return len(tokens)

    def rollback(self, count: int) -> bool:
        del self._read[len(self._read) - count :]
        return True

    def reset(self) -> None:
        self._read.clear()

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        mask = (1 << self._vocab_size) - 1
        for token in refused_tokens(self._read, self._vocab_size):
            mask ^= 1 << token
        ctypes.memmove(address, mask.to_bytes(size, "little"), size)

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        raise AssertionError("it makes no errors")


def fake_grammar(vocab_size: int) -> CompiledGrammar:
    matcher = cast(Any, FakeMatcher(vocab_size))
    return CompiledGrammar(matcher, -(-vocab_size // BITS))


def allowed_tokens(rows: tuple[SampleRow, ...], vocab_size: int) -> list[set[int]]:
    """The tokens that the engine's masks allow in each row; the cursors of the sequences stay."""
    logits = torch.zeros(len(rows), vocab_size)
    apply_grammars(logits, rows, frozenset())
    return [set(torch.isfinite(row).nonzero().flatten().tolist()) for row in logits]
