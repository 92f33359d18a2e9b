"""What proposes drafts, whichever way it comes by them."""

from typing import Protocol

from ..plan import Drafts
from ..request import Sequence


class Proposer(Protocol):
    """Keeps what it likes of each sequence until that is finished."""

    def step_seconds(self, count: int) -> float | None:
        """What one more draft for each of `count` sequences costs; 0 where that is nothing, None
        where it is not known yet."""

    def entry_seconds(self, sequence: Sequence) -> float:
        """What a sequence costs before its next draft: reading what was not seen of it yet."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> Drafts:
        """At most so many drafts a sequence; one for which there are none is left out. Called
        in each step, also if nobody wants any.

        Each sequence decodes: all its tokens but the last have been run by the target.
        """
