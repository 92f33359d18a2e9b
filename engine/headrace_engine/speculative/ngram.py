"""Prompt lookup: finds an earlier occurrence of the last tokens and proposes what followed it.

After Saxena, "Prompt lookup decoding" (2023), and vLLM's n-gram proposer. Each sequence has an
index of its n-grams that grows with it, so a step costs a few comparisons for any length of text.
"""

from array import array

from ..core.request import Sequence, State
from ..core.step_plan import Drafts

# The maximal number of occurrences that are compared, latest first.
CANDIDATES = 64
TOKEN_BITS = 32


class Index:
    """The places of each n-gram of the least length: the last one, and for each the previous one.

    A place is the position after the n-gram. The n-gram at the end of the tokens is not included,
    since nothing follows it yet. The index takes about 150 bytes a token.
    """

    __slots__ = ("_before", "_key", "_last", "_least", "_mask", "_most")

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._mask = (1 << TOKEN_BITS * least) - 1
        self._key = 0  # the n-gram before the last token
        self._last: dict[int, int] = {}
        self._before = array("i", (0,))  # for each place the previous one of its n-gram, or 0

    def grow(self, tokens: list[int]) -> None:
        """Adds the tokens that are new since the last call."""
        key, last, before = self._key, self._last, self._before
        for place in range(len(before), len(tokens)):
            key = (key << TOKEN_BITS | tokens[place - 1]) & self._mask
            if place < self._least:
                before.append(0)
                continue
            before.append(last.get(key, 0))
            last[key] = place
        self._key = key

    def find(self, tokens: list[int]) -> int | None:
        """The place after the longest match of the last tokens; the latest of equal ones."""
        key = (self._key << TOKEN_BITS | tokens[-1]) & self._mask
        place = self._last.get(key, 0) if len(tokens) >= self._least else 0
        best, longest = 0, 0
        for _ in range(CANDIDATES):
            if place == 0 or longest == self._most:
                break
            length = self._match(tokens, place)
            if length > longest:
                best, longest = place, length
            place = self._before[place]
        return best or None

    def _match(self, tokens: list[int], place: int) -> int:
        """The number of tokens before `place` that match those at the end."""
        length, most, end = self._least, min(self._most, place), len(tokens)
        while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length


class NgramProposer:
    def __init__(self, least: int, most: int) -> None:
        """Looks up n-grams of `least` to `most` tokens and prefers the longest."""
        self._least, self._most = least, most
        self._indices: dict[Sequence, Index] = {}

    def prefill_seconds(self, sequence: Sequence) -> float:
        return 0.0

    def step_seconds(self, count: int) -> float:
        return 0.0

    def propose(self, wanted: list[tuple[Sequence, int]]) -> Drafts:
        if len(self._indices) > len(wanted):
            self._forget()
        drafts: dict[Sequence, tuple[int, ...]] = {}
        for sequence, count in wanted:
            index = self._indices.get(sequence)
            if index is None:
                index = self._indices[sequence] = Index(self._least, self._most)
            index.grow(sequence.token_ids)
            start = index.find(sequence.token_ids)
            if start is not None:
                drafts[sequence] = continuation(sequence.token_ids, start, count)
        return drafts

    def _forget(self) -> None:
        """Drops finished sequences."""
        self._indices = {
            sequence: index
            for sequence, index in self._indices.items()
            if sequence.state is not State.FINISHED
        }


def continuation(tokens: list[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; the tokens found are repeated if the text ends before."""
    found = tokens[start : start + count]
    period = len(found)
    while len(found) < count:
        found.append(found[-period])
    return tuple(found)
