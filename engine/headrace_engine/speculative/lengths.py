"""Chooses how many drafts each sequence gets in a step, by measured costs.

The rule: a further draft adds its chance of acceptance to the tokens of a step, and its cost to the
step's seconds. It pays if the step then makes more tokens a second. In a batch so large that every
token makes the step slower, no draft pays, and speculation is off.

A draft model must compute a sequence before it proposes drafts; the sequence gets drafts only if
they save that time within HORIZON steps. While that cost is unknown, one sequence tries.
"""

from dataclasses import dataclass

from ..core.request import Sequence, State
from .proposer import ProposalCosts
from .step_cost_model import StepCostModel

# The assumed acceptance of new sequences, and the number of drafts that this assumption weighs.
PRIOR_WEIGHT = 2.0
HOPE = 0.7
# Each draft multiplies the weight of earlier ones by this.
DECAY = 0.9
# A sequence gets a draft after this many steps without one: its text may have changed.
PROBE_INTERVAL = 64
# Steps within which drafts must save the cost of their start.
HORIZON = 64


@dataclass(slots=True)
class AcceptanceRecord:
    """The number of checked drafts of a sequence and of accepted ones among them."""

    tried: float = 0.0
    accepted: float = 0.0
    idle: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        """Adds a step's drafts; those after the first rejected one were not checked."""
        for place in range(min(drafted, accepted + 1)):
            self.tried = self.tried * DECAY + 1.0
            self.accepted = self.accepted * DECAY + (place < accepted)

    def chance(self, prior: float) -> float:
        """The probability that a draft is accepted if those before it are."""
        return (self.accepted + PRIOR_WEIGHT * prior) / (self.tried + PRIOR_WEIGHT)


class DraftLengths:
    """Chooses the number of drafts: up to `most` if `adaptive`, else always `most`."""

    def __init__(self, most: int, costs: StepCostModel, adaptive: bool = True) -> None:
        self._most, self._costs, self._adaptive = most, costs, adaptive
        self._records: dict[Sequence, AcceptanceRecord] = {}
        self._all = AcceptanceRecord()

    def add(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Records how many of a sequence's drafts were accepted."""
        self._records.setdefault(sequence, AcceptanceRecord()).add(drafted, accepted)
        self._all.add(drafted, accepted)

    def choose(
        self, decoding: list[tuple[Sequence, int]], others: int, proposer: ProposalCosts
    ) -> list[tuple[Sequence, int]]:
        """The number of drafts for each sequence, of `decoding` with the most that each can use.

        `others` is the number of the step's other tokens.
        """
        if not self._adaptive:
            capped = [(sequence, min(self._most, room)) for sequence, room in decoding]
            return [(sequence, count) for sequence, count in capped if count > 0]
        if len(self._records) > len(decoding):
            self._forget()
        return self._paying(decoding, others, proposer)

    def _paying(
        self, decoding: list[tuple[Sequence, int]], others: int, proposer: ProposalCosts
    ) -> list[tuple[Sequence, int]]:
        tokens, width = float(len(decoding)), len(decoding) + others
        # The cost of the decodes alone: drafts do not save work on other tokens.
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
            step = proposer.step_seconds(len(live))
            if step is None:
                live, step = live[:1], 0.0
            price = self._price(width, len(live)) + step / len(live)
            live = [(at, share) for at, share in live if share * seconds > tokens * price]
            if length == 1:
                live = [
                    (at, share)
                    for at, share in live
                    if _repays(share * seconds / tokens - price, decoding[at][0], proposer)
                ]
            for at, share in live:
                lengths[at] = length
                tokens += share
            seconds += price * len(live)
            width += len(live)
        step = proposer.step_seconds(1) or 0.0
        self._probe(decoding, lengths, seconds / tokens - self._price(width, 1) - step, proposer)
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
        return self._costs.added_seconds(width, count) / count

    def _probe(
        self,
        decoding: list[tuple[Sequence, int]],
        lengths: list[int],
        saved: float,
        proposer: ProposalCosts,
    ) -> None:
        """Gives one draft to sequences that had none for a long time, if accepted drafts pay.

        Each accepted draft has `saved` that many seconds.
        """
        for at, (sequence, room) in enumerate(decoding):
            record = self._records.get(sequence)
            if record is None:
                continue
            record.idle = 0 if lengths[at] else record.idle + 1
            if record.idle >= PROBE_INTERVAL and room > 0 and _repays(saved, sequence, proposer):
                lengths[at], record.idle = 1, 0

    def _forget(self) -> None:
        self._records = {
            sequence: record
            for sequence, record in self._records.items()
            if sequence.state is not State.FINISHED
        }


def _repays(saved: float, sequence: Sequence, proposer: ProposalCosts) -> bool:
    """Whether drafts that save `saved` seconds a step repay the cost of their start."""
    return saved > 0.0 and saved * HORIZON > proposer.prefill_seconds(sequence)
