"""The interface of proposers of drafts."""

from typing import Protocol

from ..core.request import Sequence
from ..core.step_plan import Drafts


class ProposalCosts(Protocol):
    """The cost of proposing drafts."""

    def step_seconds(self, count: int) -> float | None:
        """The seconds of one more draft for each of `count` sequences; None if not known yet."""

    def prefill_seconds(self, sequence: Sequence) -> float:
        """The seconds to read a sequence's new tokens before its next draft."""


class Proposer(ProposalCosts, Protocol):
    """Proposes drafts. It may keep state for a sequence until that is finished."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> Drafts:
        """Drafts for sequences, with at most the wanted number each; none for some is allowed.

        Called in each step, also with an empty list. Each sequence decodes: the target has computed
        all its tokens but the last.
        """
