"""Groups of layers that keep the KV of the same positions: of all, or of a sliding window; and the
blocks that a sequence's recurrent state takes.

A block holds the KV of one group's layers. All blocks have the same size, so that one pool serves
all groups (as vLLM's hybrid KV cache manager). Nothing is allocated here.

    layers        0  1  2  3  4  5      layers 2 and 5 see all keys, the others a window
    groups        1  1  0  2  2  0      the group of each layer
    places        0  1  0  0  1  1      layers of one place share memory, but no blocks
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from sys import maxsize

# Each group costs a block table in every step.
MAX_GROUPS = 16
# Groups get the size of the more frequent kind of layers if it is less than this many times that of
# the other kind: its groups are then padded only a little.
FILLED_UP = 1.25


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The first `full` groups keep all positions; the `sliding` groups after them keep `window`.

    The window includes the position itself. `window` is None without sliding groups. With
    `chunked` a window does not slide: a position sees the positions since the last multiple of
    `window`. A sequence's recurrent state, of all layers together, takes `state` blocks; 0: the
    model has none."""

    full: int = 1
    sliding: int = 0
    window: int | None = None
    state: int = 0
    chunked: bool = False

    @classmethod
    def uniform(cls, window: int | None, chunked: bool = False) -> "KVGroups":
        """The single group of a model whose layers all keep the same positions."""
        return cls() if window is None else cls(0, 1, window, chunked=chunked)

    def first_seen(self, position: int) -> int:
        """The first position whose KV sliding groups need to compute `position`."""
        assert self.window is not None
        if self.chunked:
            return position // self.window * self.window
        return max(0, position + 1 - self.window)

    @property
    def count(self) -> int:
        return self.full + self.sliding

    def kept(self, block_size: int, run: int = 1) -> int:
        """The maximal number of blocks that a sliding group uses while `run` positions are
        computed."""
        assert self.window is not None
        return -(-(self.window + run - 1) // block_size) + 1

    def blocks(self, length: int, block_size: int) -> int:
        """The minimal number of blocks with which a sequence of `length` positions can be
        computed."""
        rows = -(-length // block_size)
        if self.window is None:
            return self.full * rows + self.state
        return self.full * rows + self.sliding * min(rows, self.kept(block_size)) + self.state

    def capacity(self, num_blocks: int, block_size: int) -> int:
        """The maximal number of positions of one sequence that fit `num_blocks` blocks."""
        num_blocks = max(0, num_blocks - self.state)
        rows = num_blocks // self.count
        if self.window is not None and rows >= (kept := self.kept(block_size)):
            spare = num_blocks - self.sliding * kept
            rows = spare // self.full if self.full else maxsize // block_size
        return rows * block_size


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The group of each layer, and the place in a block's memory that it shares across groups.

    Layers of some groups may have fewer KV heads than those of others. A block then has room for
    `parts` of their blocks, by group, of which they use the first. Empty: all layers are alike.
    """

    groups: KVGroups
    layers: tuple[int, ...]
    places: tuple[int, ...]
    parts: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, windows: Sequence[int | None], *, hybrid: bool = True, chunked: bool = False
    ) -> "KVLayout":
        """The layout for layers with these windows, which are chunks of one size if `chunked`.

        Without `hybrid` all layers are one group, which keeps what any of them needs.
        """
        sliding = [index for index, window in enumerate(windows) if window is not None]
        full = [index for index, window in enumerate(windows) if window is None]
        if not (hybrid and sliding and full):
            return cls._uniform(windows, chunked)
        size = _group_size(len(full), len(sliding))
        counts = -(-len(full) // size), -(-len(sliding) // size)
        if sum(counts) > MAX_GROUPS:
            return cls._uniform(windows, chunked)
        layers, places = [0] * len(windows), [0] * len(windows)
        for first, members in ((0, full), (counts[0], sliding)):
            for order, index in enumerate(members):
                layers[index] = first + order // size
                places[index] = order % size
        widest = max(windows[index] or 0 for index in sliding)
        groups = KVGroups(*counts, widest, chunked=chunked)
        return cls(groups, tuple(layers), tuple(places))

    @classmethod
    def _uniform(cls, windows: Sequence[int | None], chunked: bool) -> "KVLayout":
        known = [window for window in windows if window is not None]
        widest = max(known) if known and len(known) == len(windows) else None
        return cls(
            KVGroups.uniform(widest, chunked), (0,) * len(windows), tuple(range(len(windows)))
        )

    def with_sizes(self, sizes: Sequence[int]) -> "KVLayout | None":
        """The layout for layers whose blocks have these sizes. None if the layers of a group
        differ, or a smaller block does not divide the largest one."""
        largest = max(sizes)
        if any(
            sizes[layer] != sizes[self.layer_of_each_group[group]] or largest % sizes[layer]
            for layer, group in enumerate(self.layers)
        ):
            return None
        parts = tuple(largest // sizes[layer] for layer in self.layer_of_each_group)
        return replace(self, parts=parts)

    def with_state(self, blocks: int) -> "KVLayout":
        """The layout for a model whose recurrent state takes `blocks` blocks."""
        return replace(self, groups=replace(self.groups, state=blocks))

    @property
    def layer_of_each_place(self) -> tuple[int, ...]:
        """One layer of each place."""
        return tuple(map(self.places.index, range(len(set(self.places)))))

    @property
    def layer_of_each_group(self) -> tuple[int, ...]:
        """One layer of each group."""
        return tuple(map(self.layers.index, range(self.groups.count)))


def _group_size(full: int, sliding: int) -> int:
    fewer, more = min(full, sliding), max(full, sliding)
    return more if more < FILLED_UP * fewer else fewer


ONE_GROUP = KVLayout.of((None,))
