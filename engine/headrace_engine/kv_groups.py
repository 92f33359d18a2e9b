"""Groups of layers that keep the KV of the same positions: of all, or of a sliding window.

A block holds one group's layers, all groups have blocks of one size, and so one pool serves them
all (vLLM's hybrid KV cache manager). It counts and arranges; it allocates nothing.

    layers        0  1  2  3  4  5      of which 2 and 5 see all keys, the others a window
    groups        1  1  0  2  2  0      each layer's
    places        0  1  0  0  1  1      the layers of one place share memory, not blocks
"""

from collections.abc import Sequence
from dataclasses import dataclass
from sys import maxsize

# Each group costs a block table in every step.
MAX_GROUPS = 16
# Groups are as large as the larger kind of layers where that fills up the smaller one so little.
FILLED_UP = 1.25


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The first `full` groups keep all positions, the `sliding` ones behind them `window` each, a
    position's own included. None: there is no sliding group."""

    full: int = 1
    sliding: int = 0
    window: int | None = None

    @classmethod
    def alike(cls, window: int | None) -> "KVGroups":
        """Of a model whose layers all keep the same."""
        return cls() if window is None else cls(0, 1, window)

    @property
    def count(self) -> int:
        return self.full + self.sliding

    def kept(self, block_size: int, run: int = 1) -> int:
        """Blocks of a sliding group that are in use at most while `run` positions are computed."""
        assert self.window is not None
        return -(-(self.window + run - 1) // block_size) + 1

    def blocks(self, length: int, block_size: int) -> int:
        """The fewest that a sequence of `length` positions can be computed with."""
        rows = -(-length // block_size)
        if self.window is None:
            return self.full * rows
        return self.full * rows + self.sliding * min(rows, self.kept(block_size))

    def capacity(self, num_blocks: int, block_size: int) -> int:
        """The longest sequence that `num_blocks` hold."""
        rows = num_blocks // self.count
        if self.window is not None and rows >= (kept := self.kept(block_size)):
            spare = num_blocks - self.sliding * kept
            rows = spare // self.full if self.full else maxsize // block_size
        return rows * block_size


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Which group each layer is in, and which memory of blocks it shares with other groups'."""

    groups: KVGroups
    layers: tuple[int, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, windows: Sequence[int | None], *, hybrid: bool = True) -> "KVLayout":
        """For layers with these windows. Without `hybrid` they are one group, which keeps what any
        of them needs."""
        sliding = [index for index, window in enumerate(windows) if window is not None]
        full = [index for index, window in enumerate(windows) if window is None]
        if not (hybrid and sliding and full):
            return cls._alike(windows)
        size = _group_size(len(full), len(sliding))
        counts = -(-len(full) // size), -(-len(sliding) // size)
        if sum(counts) > MAX_GROUPS:
            return cls._alike(windows)
        layers, places = [0] * len(windows), [0] * len(windows)
        for first, members in ((0, full), (counts[0], sliding)):
            for order, index in enumerate(members):
                layers[index] = first + order // size
                places[index] = order % size
        widest = max(windows[index] or 0 for index in sliding)
        return cls(KVGroups(*counts, widest), tuple(layers), tuple(places))

    @classmethod
    def _alike(cls, windows: Sequence[int | None]) -> "KVLayout":
        known = [window for window in windows if window is not None]
        widest = max(known) if known and len(known) == len(windows) else None
        return cls(KVGroups.alike(widest), (0,) * len(windows), tuple(range(len(windows))))

    @property
    def of_places(self) -> tuple[int, ...]:
        """A layer of each place."""
        return tuple(map(self.places.index, range(len(set(self.places)))))

    @property
    def of_groups(self) -> tuple[int, ...]:
        """A layer of each group."""
        return tuple(map(self.layers.index, range(self.groups.count)))


def _group_size(full: int, sliding: int) -> int:
    fewer, more = min(full, sliding), max(full, sliding)
    return more if more < FILLED_UP * fewer else fewer


ONE_GROUP = KVLayout.of((None,))
