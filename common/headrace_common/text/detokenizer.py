"""Converts token ids to text during generation; characters and stop strings may span tokens.

The result depends only on the tokens: they give the same text however they are split into pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..sampling.params import SamplingParams
from .tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A decoder looks at few neighbours (a leading space, a character of at most 4 byte tokens).
CONTEXT_TOKENS = 6
TRIM_AT = 24
# Bytes that never become a character must be output eventually.
MAX_HELD_TOKENS = 64


class Detokenizer:
    """Decodes one choice's output incrementally, in constant average time per token.

    The window [context | new] is decoded again for each token, and its new text is returned.
    `prompt_token_ids` give the first token its context (a leading space).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt_token_ids[-CONTEXT_TOKENS:])
        text = self._decode(self._window)
        self._sent = self._stable_length(text)
        self._whole = 0 < self._sent == len(text)  # all text so far has been returned

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        if len(token_ids) != 1:
            return "".join([self.push((token_id,)) for token_id in token_ids])
        token_id = token_ids[0]
        self._window.append(token_id)
        alone = self._tokenizer.fixed_text(token_id) if self._whole else None
        if alone is None:
            return self._push_decoded()
        self._sent += len(alone)
        if len(self._window) >= TRIM_AT:
            self._trim_whole()
        return alone

    def flush(self) -> str:
        """The text that was held back. Call it once, after the last token."""
        text = self._decode(self._window)
        rest = text[self._sent :]
        self._sent = len(text)
        return rest

    def _push_decoded(self) -> str:
        text = self._decode(self._window)
        stable = self._stable_length(text)
        new = text[self._sent : stable]
        self._sent = max(self._sent, stable)
        self._whole = 0 < self._sent == len(text)
        if len(self._window) >= TRIM_AT:
            self._trim(text)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def _stable_length(self, text: str) -> int:
        """The number of characters that no later token can change: all but an unfinished one at the
        end."""
        if not text.endswith(REPLACEMENT):
            return len(text)
        if self._tokenizer.byte_fallback and len(self._window) < MAX_HELD_TOKENS:
            # The decoder turns a whole run of bytes into replacement characters while it lasts.
            return len(text.rstrip(REPLACEMENT))
        return len(text) - 1

    def _trim_whole(self) -> None:
        """Drops tokens at the front; if the others have fixed texts, without decoding all."""
        kept = self._window[-CONTEXT_TOKENS:]
        fixed = all(self._tokenizer.fixed_text(token_id) is not None for token_id in kept)
        if fixed and (text := self._decode(kept)):
            self._window, self._sent = kept, len(text)
        else:
            self._trim(self._decode(self._window))

    def _trim(self, text: str) -> None:
        """Drops tokens at the front if the rest decodes to the same text without them."""
        kept = self._window[-CONTEXT_TOKENS:]
        kept_text = self._decode(kept)
        held = len(text) - self._sent
        alone = kept_text and not held and text.endswith(kept_text)
        if alone or len(self._window) >= 2 * MAX_HELD_TOKENS:
            self._window = kept
            self._sent = max(0, len(kept_text) - held)


@dataclass(frozen=True, slots=True)
class StopScan:
    """`text` may be shown; `stop` is the stop string that ended the output, or None."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the first complete stop string over any number of pieces of text.

    If several end at the same character, the longest wins. Only text that may begin a stop string
    is held back. It has one Knuth-Morris-Pratt automaton for each string.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(sorted(dict.fromkeys(stops), key=len, reverse=True))
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._include = include_stop
        self._held = ""

    def push(self, text: str) -> StopScan:
        """Takes more text and returns the text that can now be shown."""
        if not self._stops:
            return StopScan(text)
        for position, character in enumerate(text):
            stop = self._advance(character)
            if stop is not None:
                seen = self._held + text[: position + 1]
                self._held = ""
                return StopScan(seen if self._include else seen[: -len(stop)], stop)
        pending = self._held + text
        shown = len(pending) - max(self._matched)
        self._held = pending[shown:]
        return StopScan(pending[:shown])

    def flush(self) -> str:
        """The text that was held back, after the last piece of text without a match."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        for index, stop in enumerate(self._stops):
            length = self._matched[index]
            while length and stop[length] != character:
                length = self._tables[index][length - 1]
            if stop[length] == character:
                length += 1
            if length == len(stop):
                return stop
            self._matched[index] = length
        return None


class TextPiece(NamedTuple):
    """New text of one choice, and how many `tokens` belong to it, without those after a stop."""

    text: str
    tokens: int
    stop: str | None = None


class ChoiceText:
    """Turns one choice's tokens into the text for its client, under its sampling parameters.

    A stop token's own text is left out, and stop strings count only after `min_tokens`, as in vLLM.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._matcher = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._include_stop = params.include_stop_str_in_output
        self.has_stops = bool(params.stop)
        self._min_tokens = params.min_tokens
        self._count = 0

    def push_plain(self, token_ids: Sequence[int]) -> str:
        """A fast path of `push` for tokens that are not the last, without stop strings."""
        return self._detokenizer.push(token_ids)

    def push(
        self,
        token_ids: Sequence[int],
        *,
        finish_reason: str | None = None,
        stop_token: int | None = None,
    ) -> TextPiece:
        """Takes new tokens; with a `finish_reason` they are the last and nothing is held back."""
        if finish_reason is None and not self.has_stops:
            return TextPiece(self.push_plain(token_ids), len(token_ids))
        hidden = finish_reason == "stop" and self._ends_with_stop(token_ids, stop_token)
        visible = token_ids[:-1] if hidden else token_ids
        shown: list[str] = []
        for index, token_id in enumerate(visible):
            scan = self._scan(token_id)
            shown.append(scan.text)
            if scan.stop is not None:
                return TextPiece("".join(shown), index + 1, scan.stop)
        if finish_reason is None:
            return TextPiece("".join(shown), len(token_ids))
        rest = self._matcher.push(self._detokenizer.flush())
        shown.append(rest.text)
        if rest.stop is None:
            shown.append(self._matcher.flush())
        return TextPiece("".join(shown), len(token_ids), rest.stop)

    def _scan(self, token_id: int) -> StopScan:
        self._count += 1
        text = self._detokenizer.push((token_id,))
        if self._count <= self._min_tokens:
            return StopScan(text)
        return self._matcher.push(text)

    def _ends_with_stop(self, token_ids: Sequence[int], stop_token: int | None) -> bool:
        if self._include_stop or not token_ids:
            return False
        if stop_token is not None:
            return token_ids[-1] == stop_token
        return token_ids[-1] in self._eos


def _failure_table(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return table
