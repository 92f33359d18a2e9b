"""How many drafts each sequence gets in a step: as many as pay by what was measured.

The rule: one more draft adds its chance of being accepted to the tokens of a step, and its cost to
the step's seconds; it is worth it if that is more tokens a second than the step makes without it.
Where a batch is so large that its cost grows with every token, no draft is, and speculation is off.

A sequence that the proposer must read first, as a draft model must, gets drafts only if they repay
that within HORIZON steps. While it is not known what proposing costs, one sequence tries it out.
"""

from dataclasses import dataclass
from typing import Protocol

from ..request import Sequence, State
from .costs import StepCosts

# What counts as the acceptance of a sequence that has hardly begun, and how many drafts it weighs.
PRIOR_WEIGHT = 2.0
HOPE = 0.7
# The share of older evidence that each draft leaves.
DECAY = 0.9
# After so many steps without drafts a sequence gets one all the same: it may have changed.
PROBE_INTERVAL = 64
# Steps in which drafts must have saved what it costs to begin with them.
HORIZON = 64


class Prices(Protocol):
    """What proposing costs; `proposer.Proposer` is one."""

    def step_seconds(self, count: int) -> float | None: ...
    def entry_seconds(self, sequence: Sequence) -> float: ...


@dataclass(slots=True)
class Record:
    """Drafts of a sequence that were looked at, and those of them that were accepted."""

    tried: float = 0.0
    accepted: float = 0.0
    idle: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        """Drafts behind the first rejected one were not looked at."""
        for place in range(min(drafted, accepted + 1)):
            self.tried = self.tried * DECAY + 1.0
            self.accepted = self.accepted * DECAY + (place < accepted)

    def chance(self, prior: float) -> float:
        """That a draft is accepted if those before it are."""
        return (self.accepted + PRIOR_WEIGHT * prior) / (self.tried + PRIOR_WEIGHT)


class Lengths:
    """`most` drafts a sequence; `adaptive` False always asks for as many."""

    def __init__(self, most: int, costs: StepCosts, adaptive: bool = True) -> None:
        self._most, self._costs, self._adaptive = most, costs, adaptive
        self._records: dict[Sequence, Record] = {}
        self._all = Record()

    def add(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """What became of a sequence's drafts."""
        self._records.setdefault(sequence, Record()).add(drafted, accepted)
        self._all.add(drafted, accepted)

    def choose(
        self, decoding: list[tuple[Sequence, int]], others: int, prices: Prices
    ) -> list[tuple[Sequence, int]]:
        """Who gets how many, of sequences with the most that each can use.

        `others` are the step's tokens that are not theirs.
        """
        if not self._adaptive:
            capped = [(sequence, min(self._most, room)) for sequence, room in decoding]
            return [(sequence, count) for sequence, count in capped if count > 0]
        if len(self._records) > len(decoding):
            self._forget()
        return self._paying(decoding, others, prices)

    def _paying(
        self, decoding: list[tuple[Sequence, int]], others: int, prices: Prices
    ) -> list[tuple[Sequence, int]]:
        tokens, width = float(len(decoding)), len(decoding) + others
        # What decodes cost alone: drafts save none of the others' work.
        seconds = self._costs.seconds(len(decoding))
        if seconds is None:  # it must be known first
            return []
        chances = self._chances(decoding)
        lengths = [0] * len(decoding)
        live = [(index, 1.0) for index in range(len(decoding))]
        for length in range(1, self._most + 1):
            live = [(at, share * chances[at]) for at, share in live if decoding[at][1] >= length]
            if not live:
                break
            step = prices.step_seconds(len(live))
            if step is None:
                live, step = live[:1], 0.0
            price = self._price(width, len(live)) + step / len(live)
            live = [(at, share) for at, share in live if share * seconds > tokens * price]
            if length == 1:
                live = [
                    (at, share)
                    for at, share in live
                    if _repays(share * seconds / tokens - price, decoding[at][0], prices)
                ]
            for at, share in live:
                lengths[at] = length
                tokens += share
            seconds += price * len(live)
            width += len(live)
        step = prices.step_seconds(1) or 0.0
        self._probe(decoding, lengths, seconds / tokens - self._price(width, 1) - step, prices)
        return [
            (sequence, length)
            for (sequence, _), length in zip(decoding, lengths, strict=True)
            if length
        ]

    def _chances(self, decoding: list[tuple[Sequence, int]]) -> list[float]:
        prior = self._all.chance(HOPE)
        records = self._records
        return [
            prior if (record := records.get(sequence)) is None else record.chance(prior)
            for sequence, _ in decoding
        ]

    def _price(self, width: int, count: int) -> float:
        """Seconds that each of `count` further tokens adds to a step of `width`."""
        return self._costs.growth(width, count) / count

    def _probe(
        self,
        decoding: list[tuple[Sequence, int]],
        lengths: list[int],
        saved: float,
        prices: Prices,
    ) -> None:
        """Gives those one draft that had none for long, if that pays where drafts are accepted, of
        which each has `saved` so many seconds."""
        for at, (sequence, room) in enumerate(decoding):
            record = self._records.get(sequence)
            if record is None:
                continue
            record.idle = 0 if lengths[at] else record.idle + 1
            if record.idle >= PROBE_INTERVAL and room > 0 and _repays(saved, sequence, prices):
                lengths[at], record.idle = 1, 0

    def _forget(self) -> None:
        self._records = {
            sequence: record
            for sequence, record in self._records.items()
            if sequence.state is not State.FINISHED
        }


def _repays(saved: float, sequence: Sequence, prices: Prices) -> bool:
    """Whether drafts that save so many seconds a step are worth beginning with a sequence."""
    return saved > 0.0 and saved * HORIZON > prices.entry_seconds(sequence)
