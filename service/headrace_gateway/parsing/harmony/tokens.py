"""Counts the tokens of Harmony's reasoning: of whole messages, with their headers and ends.

Uses ids only, so that the text that came with them does not matter.
"""

from collections.abc import Collection, Sequence

from headrace_common.text.tokenizer import Tokenizer

from .header import CHANNEL, ENDS, MESSAGE, START, Begin, Header, Purpose


class HarmonyTokens:
    """Counts reasoning tokens. `known` as for the parser."""

    def __init__(self, tokenizer: Tokenizer, known: Collection[str] | None, begin: Begin) -> None:
        self.total = 0
        self._tokenizer = tokenizer
        self._known = known
        self._message = tokenizer.token_to_id(MESSAGE)
        self._begins = {tokenizer.token_to_id(each) for each in (START, CHANNEL)}
        self._ends = {tokenizer.token_to_id(each) for each in ENDS}
        self._before = begin.header
        self._header: list[int] | None = None if begin.inside else []
        self._between = False
        self._reasons = begin.inside and self._is_reasoning(begin.header)

    def push(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._take(token_id)

    def _take(self, token_id: int) -> None:
        if self._between and token_id in self._begins:
            self._header, self._between = [], False
        if self._header is None:
            self.total += self._reasons
            if token_id in self._ends:
                self._reasons, self._between = False, True
        elif token_id != self._message:
            self._header.append(token_id)
        else:
            self._end_header(self._header)

    def _end_header(self, ids: list[int]) -> None:
        words = self._tokenizer.decode(ids, skip_special_tokens=False)
        self._reasons = self._is_reasoning(self._before + words)
        self.total += (len(ids) + 1) * self._reasons
        self._header, self._before = None, ""

    def _is_reasoning(self, header: str) -> bool:
        return Header.read(header).purpose(self._known) is Purpose.REASONING
