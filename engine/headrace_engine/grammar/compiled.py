"""A compiled grammar, and where one output stands in it.

The state is a function of the output's tokens alone: it is made again from them after a move to
another engine, and rolled back where tokens that were only proposed are not taken.
"""

from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING

from headrace_common.grammars import error_text

if TYPE_CHECKING:
    from llguidance import LLMatcher


class CompiledGrammar:
    """A grammar for one vocabulary. Shared by all outputs that it constrains; never changed.

    `words` is the size of a mask with a bit for each token, in int32.
    """

    __slots__ = ("_start", "words")

    def __init__(self, start: "LLMatcher", words: int) -> None:
        self._start = start
        self.words = words

    def cursor(self) -> "GrammarCursor":
        """A new place at the grammar's beginning."""
        return GrammarCursor(self._start.deep_copy())


class GrammarCursor:
    """How far one output is. Used by the thread that runs the engine's steps.

    Tokens that it has read: `_sure` of the output, which only grows, then `_ahead` beyond it, which
    may not come true.
    """

    __slots__ = ("_ahead", "_matcher", "_sure", "error")

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher
        self._sure = 0
        self._ahead: list[int] = []
        self.error: str | None = None

    def advance(
        self,
        known: Tokens[int],
        prompt: int,
        ahead: Tokens[int] = (),
        *,
        end: int | None = None,
    ) -> bool:
        """Goes to the place behind `known[prompt:end]` and `ahead`; False where there is none.

        `known` are prompt and output. Where the output itself does not match, or the grammar's
        limits are exceeded, `error` says so and stays.
        """
        end = len(known) if end is None else end
        if end - prompt < self._sure:
            self._restart()
        wanted = known[prompt + self._sure : end]
        fresh = len(wanted)
        if ahead:
            wanted = [*wanted, *ahead]
        kept = _common(wanted, self._ahead)
        if self._ahead:
            self._back(len(self._ahead) - kept)
        read = kept + self._matcher.try_consume_tokens(list(wanted[kept:]))
        self._ahead = list(wanted[fresh:read])
        self._sure += min(fresh, read)
        if self._matcher.is_error():
            self.error = self._matcher.get_error()
        elif read < fresh:
            self.error = f"output token {wanted[read]} does not match"
        return self.error is None and read == len(wanted)

    @property
    def failure(self) -> str:
        """Why its output could not go on, for the user."""
        reason = "nothing is left that it and the other parameters allow"
        return f"structured_outputs: {reason if self.error is None else error_text(self.error)}"

    def fill(self, address: int, size: int) -> bool:
        """Writes a bit for each token that may come next to `size` bytes at `address`.

        False where the grammar's limits are exceeded; `error` then says which. Lets other threads
        run meanwhile.
        """
        self._matcher.unsafe_compute_mask_ptr(address, size)
        if self._matcher.is_error():
            self.error = self._matcher.get_error()
        return self.error is None

    def _back(self, count: int) -> None:
        if count and not self._matcher.rollback(count):
            self.error = self._matcher.get_error()

    def _restart(self) -> None:
        self._matcher.reset()
        self._sure = 0
        self._ahead = []


def _common(left: Tokens[int], right: Tokens[int]) -> int:
    for count, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return count
    return min(len(left), len(right))
