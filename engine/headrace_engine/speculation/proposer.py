"""What proposes drafts, whichever way it comes by them."""

from typing import Protocol

from ..plan import Drafts
from ..request import Sequence


class Proposer(Protocol):
    """Keeps what it likes of each sequence until that is finished."""

    def step_seconds(self, count: int) -> float:
        """What one more draft for each of `count` sequences costs; 0 where that is nothing."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> Drafts:
        """At most so many drafts a sequence; one for which there are none is left out.

        Each sequence decodes: all its tokens but the last have been run by the target.
        """
