"""A compiled grammar, and the position of one output in it.

The position depends on the output's tokens only: another engine rebuilds it from them, and it is
rolled back if drafts are rejected.
"""

from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING

from headrace_common.structured.grammars import error_text

if TYPE_CHECKING:
    from llguidance import LLMatcher


class CompiledGrammar:
    """A grammar for one vocabulary. Immutable; all outputs that it constrains share it.

    `words` is the number of int32 words of a mask with one bit for each token.
    """

    __slots__ = ("_start", "words")

    def __init__(self, start: "LLMatcher", words: int) -> None:
        self._start = start
        self.words = words

    def cursor(self) -> "GrammarCursor":
        """A new cursor at the grammar's beginning."""
        return GrammarCursor(self._start.deep_copy())


class GrammarCursor:
    """The position of one output in its grammar. Used by the thread that runs the engine's steps.

    It has read the first `_sure` output tokens and after them the drafts `_ahead`, which may be
    rejected.
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
        """Moves to the position after `known[prompt:end]` and `ahead`; False if `ahead` is refused.

        `known` are prompt and output. If the output itself does not match, or a limit of the
        grammar is exceeded, `error` is set for good and the result is False.
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
        """Tells the user why the output could not continue."""
        reason = "nothing is left that it and the other parameters allow"
        return f"structured_outputs: {reason if self.error is None else error_text(self.error)}"

    def fill(self, address: int, size: int) -> bool:
        """Writes the mask of allowed next tokens into the `size` bytes at `address`.

        Returns False and sets `error` if a limit of the grammar is exceeded. Releases the GIL.
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
