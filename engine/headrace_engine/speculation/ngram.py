"""Prompt lookup: drafts are what followed the last tokens where they stood before.

After Saxena, "Prompt lookup decoding" (2023), and vLLM's n-gram proposer. An index of each
sequence's n-grams grows with it, so that a step costs a few comparisons, however long the text.
"""

from array import array

from ..plan import Drafts
from ..request import Sequence, State

# Occurrences that are compared, the latest first, until one matches as far as asked for.
CANDIDATES = 64
TOKEN_BITS = 32


class Index:
    """Where each n-gram of the least length stood: its last place, and from each the one before.

    A place is the position behind the n-gram; what the tokens end with is not in it, as nothing
    follows that yet. It takes some 150 bytes a token.
    """

    __slots__ = ("_before", "_key", "_last", "_least", "_mask", "_most")

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._mask = (1 << TOKEN_BITS * least) - 1
        self._key = 0  # the n-gram before the last token
        self._last: dict[int, int] = {}
        self._before = array("i", (0,))  # for each place the one before of the same n-gram, or 0

    def grow(self, tokens: list[int]) -> None:
        """Takes in the tokens that have come since it grew last."""
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
        """Behind the longest match of what the tokens end with; of equal ones behind the last."""
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
        """How many tokens before `place` are those at the end."""
        length, most, end = self._least, min(self._most, place), len(tokens)
        while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length


class NgramProposer:
    def __init__(self, least: int, most: int) -> None:
        """N-grams of `least` to `most` tokens are looked up, the longest first."""
        self._least, self._most = least, most
        self._indices: dict[Sequence, Index] = {}

    def entry_seconds(self, sequence: Sequence) -> float:
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
    """`count` tokens from `start` on; at the end of the text it goes on as it did from there."""
    found = tokens[start : start + count]
    period = len(found)
    while len(found) < count:
        found.append(found[-period])
    return tuple(found)
