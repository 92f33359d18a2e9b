"""A limit on the tokens of reasoning, and how much of it an output has used.

The position depends on the output's tokens only: another engine derives it from them, and drafts do
not change it.
"""

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from enum import Enum
from typing import NamedTuple

from headrace_common.sampling.thinking import ThinkingBegin, ThinkingFormat


class Phase(Enum):
    OPEN = "before the opening marker"
    INSIDE = "in reasoning"
    ENDING = "in the text that ends it"
    OVER = "after it"


class ThinkingState(NamedTuple):
    """`text` is the text that is searched for the next marker. `spent` counts tokens of reasoning,
    `written` those of the ending.
    """

    phase: Phase
    text: str = ""
    spent: int = 0
    written: int = 0


class ThinkingBudget:
    """The most tokens of reasoning of one request. Immutable; all its outputs share it.

    `text_of` returns a token's text. `ending` are the tokens of the format's ending.
    """

    __slots__ = ("_budget", "_ending", "_format", "_text_of", "start")

    def __init__(
        self,
        budget: int,
        form: ThinkingFormat,
        ending: tuple[int, ...],
        text_of: Callable[[int], str],
    ) -> None:
        self._budget = budget
        self._format = form
        self._ending = ending
        self._text_of = text_of
        inside = form.begin is ThinkingBegin.INSIDE
        self.start = (
            ThinkingState(Phase.INSIDE) if inside else ThinkingState(Phase.OPEN, form.begun)
        )

    def forced(self, state: ThinkingState) -> int | None:
        """The only token that may come next; None if any may."""
        if state.phase is Phase.ENDING:
            return self._ending[state.written]
        if state.phase is Phase.INSIDE and state.spent >= self._budget:
            return self._ending[0]
        return None

    def after(self, state: ThinkingState, token: int) -> ThinkingState:
        """The state after one more token."""
        if state.phase is Phase.OVER:
            return state
        if token == self.forced(state):
            return self._ended(state)
        text = state.text + self._text_of(token)
        return self._opened(state, text) if state.phase is Phase.OPEN else self._inside(state, text)

    def _ended(self, state: ThinkingState) -> ThinkingState:
        written = state.written + 1
        if written < len(self._ending):
            return state._replace(phase=Phase.ENDING, written=written)
        return self._closed(state.spent)

    def _closed(self, spent: int) -> ThinkingState:
        return ThinkingState(Phase.OPEN if self._format.again else Phase.OVER, "", spent)

    def _opened(self, state: ThinkingState, text: str) -> ThinkingState:
        opening, answer = self._format.opening, self._format.answer
        if self._format.again:
            if answer and answer in text:
                return ThinkingState(Phase.OVER)
            if opening in text:
                return ThinkingState(Phase.INSIDE, "", state.spent)
            return state._replace(text=text[-max(len(opening), len(answer)) :])
        begun = text.lstrip()
        if begun.startswith(opening):
            return ThinkingState(Phase.INSIDE)
        return (
            state._replace(text=begun) if opening.startswith(begun) else ThinkingState(Phase.OVER)
        )

    def _inside(self, state: ThinkingState, text: str) -> ThinkingState:
        closing = self._format.closing
        if closing in text:
            return self._closed(state.spent + 1)
        return ThinkingState(Phase.INSIDE, text[-len(closing) :], state.spent + 1)


class ThinkingCursor:
    """The position of one output. Used by the thread that runs the engine's steps."""

    __slots__ = ("_budget", "_known", "_state")

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._state = budget.start
        self._known = 0

    def forced(self, known: Tokens[int], prompt: int, end: int, ahead: Tokens[int]) -> int | None:
        """The only token that may follow `known[prompt:end]` and `ahead`; None if any may."""
        if end - prompt < self._known:
            self._state, self._known = self._budget.start, 0
        for token in known[prompt + self._known : end]:
            self._state = self._budget.after(self._state, token)
        self._known = end - prompt
        state = self._state
        for token in ahead:
            state = self._budget.after(state, token)
        return self._budget.forced(state)
