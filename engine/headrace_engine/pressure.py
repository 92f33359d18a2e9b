"""Memory pressure: which running sequences give way when blocks run out, and how.

The earliest running sequence is never preempted for a later one, so something always goes on. Who
is early and who is late is the policy's to say.
"""

from .books import Books
from .displacement import choose_victims
from .group import Group
from .request import Sequence, State
from .swapping import Swapping


class MemoryPressure:
    """Preempts for one scheduler: by a swap where `swapping` finds that cheaper, else by dropping
    what was computed. `recomputed` counts the latter since the start.
    """

    def __init__(self, books: Books, swapping: Swapping | None, watermark: int) -> None:
        self._books = books
        self._swapping = swapping
        self._kv = books.kv
        self._watermark = watermark
        self.recomputed = 0

    def make_room(self, *, preempting: bool = True) -> list[Sequence] | None:
        """Preempts until each decode can have its next row of blocks; returns those that need one.

        Also, an earlier prefill that has none to go on with takes one from a later sequence.
        None, and nothing changed, where somebody would have to give way but may not now.
        """
        kv, books = self._kv, self._books
        row = kv.groups.count
        needy = kv.short(books.decoding)
        while (spare := kv.pool.num_free - len(needy) * row) < 0 or (
            spare < row and self._prefill_starves()
        ):
            if not preempting:
                return None
            self.preempt(max(books.running(), key=books.key))
            needy = kv.short(books.decoding)
        return needy

    def preempt(self, victim: Sequence) -> None:
        """Takes a sequence's blocks; its key puts it before all that came later.

        Beams give way together, and are recomputed.
        """
        group = self._books.group_of(victim)
        if group.together:
            self._preempt_all(group)
            return
        if self._swapping is not None and self._swapping.swap_out(victim):
            return
        self._books.leave(victim)
        victim.transition(State.PREEMPTED)
        self._books.waiting.push(self._books.key(victim), victim)
        self.recomputed += 1

    def _preempt_all(self, group: Group) -> None:
        for sequence in group.sequences:
            if sequence.state is State.RUNNING:
                self._books.leave(sequence)
                sequence.transition(State.PREEMPTED)
                self.recomputed += 1
        group.followers[:] = group.sequences
        self._books.together.discard(group)
        self._books.queue_leader(group)

    def outranks_any(self, head: Sequence) -> bool:
        """Whether the policy would let `head` take the place of something that runs."""
        outranks, request = self._books.policy.outranks, head.request
        return any(outranks(request, each.request) for each in self._books.running())

    def victims(self, head: Sequence, blocks: int) -> list[Sequence] | None:
        """What must give way so that `head` can start with `blocks`, latest first.

        None where all that it may preempt would not be enough.
        """
        books = self._books
        outranks, request = books.policy.outranks, head.request
        found = [each for each in books.running() if outranks(request, each.request)]
        if not found:
            return None
        staying = set(books.running()).difference(found)
        blocks += self._watermark + sum(map(self._growth, staying))
        return choose_victims(
            sorted(found, key=books.key, reverse=True),
            self._kv,
            blocks=blocks,
            slots=books.free_slots - books.group_of(head).width + 1,
            alone=len(found) == books.num_running,
        )

    def _prefill_starves(self) -> bool:
        books = self._books
        if not books.prefilling:
            return False
        first = min(books.prefilling, key=books.key)
        last = max(books.running(), key=books.key)
        group = books.group_of(first)
        if last is first or (group.together and last in group.sequences):
            return False
        return bool(self._kv.short((first,)))

    def _growth(self, sequence: Sequence) -> int:
        """The blocks that it still needs for all tokens it knows."""
        least = len(self._kv.short((sequence,))) * self._kv.groups.count
        return max(self._kv.growth(sequence), least)
