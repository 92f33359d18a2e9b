"""Estimates of a step's seconds by its number of tokens, learned from measured steps.

It reads no clock. Estimates that are not confirmed decrease slowly, so that every number of tokens
is tried again: a measurement on a busy machine does not count indefinitely.
"""

from bisect import bisect_left
from dataclasses import dataclass
from math import log2

# Up to this number of tokens each has its own bucket; above there are four buckets to an octave.
EXACT = 8
# Every MEMORY steps, the estimate of an unvisited bucket is multiplied by DISCOUNT.
MEMORY = 64
DISCOUNT = 0.97
# Samples until a bucket counts as known. Of the first two the smaller counts, as one may be an
# outlier.
SAMPLES = 2
# A further sample moves the estimate by GAIN of the difference, at most by REACH of the estimate.
GAIN = 0.2
REACH = 0.05


@dataclass(slots=True)
class _Bucket:
    tokens: int
    seconds: float
    samples: int
    step: int


class StepCostModel:
    """An estimate for each bucket, which follows its samples but limits outliers."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._steps = 0

    def skip(self) -> None:
        """Counts a step without an observation."""
        self._steps += 1
        if self._steps % MEMORY == 0:
            self._discount()

    def observe(self, tokens: int, seconds: float) -> None:
        self.skip()
        key = _key(tokens)
        bucket = self._buckets.get(key)
        if bucket is None:
            self._buckets[key] = _Bucket(tokens, seconds, 1, self._steps)
            return
        bucket.samples += 1
        bucket.tokens, bucket.step = tokens, self._steps
        if bucket.samples == SAMPLES:
            bucket.seconds = min(bucket.seconds, seconds)
            return
        reach = REACH * bucket.seconds
        bucket.seconds += max(-reach, min(reach, GAIN * (seconds - bucket.seconds)))

    def seconds(self, tokens: int) -> float | None:
        """The seconds of a step of `tokens` tokens; None if its bucket is not known yet."""
        bucket = self._buckets.get(_key(tokens))
        return None if bucket is None or bucket.samples < SAMPLES else bucket.seconds

    @property
    def is_known(self) -> bool:
        """Whether any bucket is known."""
        return any(bucket.samples >= SAMPLES for bucket in self._buckets.values())

    def interpolated(self, tokens: int) -> float:
        """The seconds of a step of `tokens` tokens, interpolated; 0 if no bucket is known."""
        return _at(self._known(), tokens)

    def added_seconds(self, tokens: int, more: int) -> float:
        """The seconds that `more` tokens add to a step of `tokens` tokens, interpolated.

        Optimistic: 0 if no larger step is known.
        """
        known = self._known()
        return max(0.0, _at(known, tokens + more) - _at(known, tokens))

    def _known(self) -> list[tuple[int, float]]:
        found = [
            (bucket.tokens, bucket.seconds)
            for bucket in self._buckets.values()
            if bucket.samples >= SAMPLES
        ]
        return sorted(found)

    def _discount(self) -> None:
        for bucket in self._buckets.values():
            if bucket.step <= self._steps - MEMORY:
                bucket.seconds *= DISCOUNT


def _key(tokens: int) -> int:
    return tokens if tokens <= EXACT else EXACT + round(4 * log2(tokens / EXACT))


def _at(known: list[tuple[int, float]], tokens: int) -> float:
    """Interpolates between the neighbours in `known`; constant beyond its ends."""
    place = bisect_left(known, (tokens, 0.0))
    if place == len(known):
        return known[-1][1] if known else 0.0
    right, top = known[place]
    if place == 0 or right == tokens:
        return top
    left, low = known[place - 1]
    return low + (top - low) * (tokens - left) / (right - left)
