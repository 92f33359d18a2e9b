"""Compiles structured outputs for a model's vocabulary, before their requests enter the engine.

The engine's steps never wait for a compilation.
"""

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING

from headrace_common.structured.grammars import error_text, grammar_text, parser_limits
from headrace_common.structured.structured import StructuredOutputError, StructuredOutputsParams

from ..core.compiled_grammar import CompiledGrammar
from ..core.errors import RequestError
from .thinking_budgets import ThinkingBudgets

if TYPE_CHECKING:
    from headrace_common.text.tokenizer import Tokenizer

CACHE_SIZE = 128
MASK_BITS = 32


class GrammarCompiler:
    """Compiles grammars and caches the most recently used ones. Thread-safe.

    Make it at start: for 128,000 tokens that takes about 0.7 s and 90 MB, and blocks all Python
    threads. Raises RequestError if llguidance is not installed. `thinking` makes limits on tokens
    of reasoning for the same vocabulary.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        vocab_size: int,
        eos_token_ids: frozenset[int],
        cache_size: int = CACHE_SIZE,
    ) -> None:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise RequestError(
                "structured outputs need llguidance: install it with pip install llguidance"
            ) from error
        size = max(vocab_size, tokenizer.vocab_size)
        self._words = -(-size // MASK_BITS)
        self.thinking = ThinkingBudgets(tokenizer)
        self._can_end = bool(eos_token_ids)
        self._tokenizer = LLTokenizer(
            tokenizer.to_json(),
            n_vocab=size,
            eos_token=sorted(eos_token_ids) or None,
        )
        # Special tokens by their text.
        self._special = {
            text: token_id
            for text, token_id in tokenizer.added_tokens.items()
            if self._tokenizer.is_special_token(token_id)
        }
        self._limits = parser_limits()
        self._kept: OrderedDict[StructuredOutputsParams, CompiledGrammar] = OrderedDict()
        self._cache_size = cache_size
        self._lock = Lock()

    def find(self, structured: StructuredOutputsParams) -> CompiledGrammar | None:
        """The cached grammar, or None."""
        with self._lock:
            found = self._kept.get(structured)
            if found is not None:
                self._kept.move_to_end(structured)
            return found

    def compile(self, structured: StructuredOutputsParams) -> CompiledGrammar:
        """Compiles a grammar. Raises RequestError.

        It takes up to about 300 ms of CPU without the GIL for grammars that pass `grammar_checks`.
        """
        if (found := self.find(structured)) is not None:
            return found
        compiled = self._compile(structured)
        with self._lock:
            self._kept[structured] = compiled
            while len(self._kept) > self._cache_size:
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, structured: StructuredOutputsParams) -> CompiledGrammar:
        from llguidance import LLMatcher

        if not self._can_end:
            raise RequestError(
                "structured_outputs need a model with an end-of-sequence token: this one has none"
            )
        try:
            text = grammar_text(structured, self._special)
        except StructuredOutputError as error:
            raise RequestError(f"structured_outputs.{error}") from error
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            reason = error_text(matcher.get_error())
            raise RequestError(f"structured_outputs.{structured.kind}: {reason}")
        return CompiledGrammar(matcher, self._words)
