"""What a step costs by its number of tokens, learned from the steps themselves.

It reads no clock. What was not seen lately is believed to have become a little cheaper, so that it
is tried again now and then: what a busy machine once made slow is not avoided for ever.
"""

from bisect import bisect_left
from dataclasses import dataclass
from math import log2

# Up to here every number of tokens is a bucket of its own, above there are four to an octave.
EXACT = 8
# So often, in steps, a bucket that was not met meanwhile is taken for so much cheaper.
MEMORY = 64
DISCOUNT = 0.97
# One sample may be an accident; of two the better counts.
SAMPLES = 2
# How far each further sample draws the estimate to itself, and how far at most.
GAIN = 0.2
REACH = 0.05


@dataclass(slots=True)
class _Bucket:
    tokens: int
    seconds: float
    samples: int
    step: int


class StepCosts:
    """An estimate for each bucket that follows its samples, but no accident far."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._steps = 0

    def rest(self) -> None:
        """A step in which there was nothing to observe."""
        self._steps += 1
        if self._steps % MEMORY == 0:
            self._discount()

    def observe(self, tokens: int, seconds: float) -> None:
        self.rest()
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
        """The time of a step of so many tokens; None where such a step is not known yet."""
        bucket = self._buckets.get(_key(tokens))
        return None if bucket is None or bucket.samples < SAMPLES else bucket.seconds

    @property
    def is_known(self) -> bool:
        """Whether there is any number of tokens whose cost is known."""
        return any(bucket.samples >= SAMPLES for bucket in self._buckets.values())

    def nearest(self, tokens: int) -> float:
        """The time of a step of so many tokens, by the nearest known ones; 0 without any."""
        return _at(self._known(), tokens)

    def growth(self, tokens: int, more: int) -> float:
        """What `more` tokens add to a step of a known number: by the nearest known steps, and
        nothing where no larger one is known, which is hopeful."""
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
    """Between the neighbours in `known`; at its ends it goes on flat."""
    place = bisect_left(known, (tokens, 0.0))
    if place == len(known):
        return known[-1][1] if known else 0.0
    right, top = known[place]
    if place == 0 or right == tokens:
        return top
    left, low = known[place - 1]
    return low + (top - low) * (tokens - left) / (right - left)
