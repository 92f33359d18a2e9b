"""Which kernels begin while those before them end: programmatic dependent launch, from Hopper on;
and whether norms are launches of their own.

Decides how kernels are launched and knows nothing of what they compute. It is on only while a step
is recorded for which it was measured to pay (`tuning.steps`): all else is launched one by one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# How a kernel is compiled: without it; such that what comes behind it may begin when it has waited
# itself; or such that this may begin at once.
ALONE, DEPENDENT, EARLY = 0, 1, 2
# Of weights that a product asks for before it waits: of each row of a tile a multiple of this, and
# never more of all than a third of what Hopper's L2 cache holds.
PREFETCH_MULTIPLE = 256
MOST_PREFETCHED = 16 << 20

# Triton takes both as options and constants of a launch.
Options = dict[str, int]


@dataclass(frozen=True, slots=True)
class DependentLaunch:
    """Products have about `prefetch` bytes of their weights on their way into the L2 cache before
    they wait, asked for in `lines` or in longer stretches. If `early`, kernels without products let
    the next one begin before they wait."""

    prefetch: int = 0
    early: bool = False
    lines: bool = False


@dataclass(frozen=True, slots=True)
class StepLaunch:
    """How kernels overlap, None: one by one; and whether norms are parts of the products around
    them, where the model can have them so."""

    overlap: DependentLaunch | None = None
    fused_norms: bool = False


PLAIN_STEP = StepLaunch()


class DependentLaunches:
    """How the kernels of one model are launched now. Used by one thread, as steps are."""

    def __init__(self) -> None:
        self._chosen: tuple[tuple[int, StepLaunch], ...] = ()
        self._step = PLAIN_STEP

    def choose(self, rows: int, step: StepLaunch) -> None:
        """For recorded steps of up to `rows` rows, and more than the bound below."""
        others = [one for one in self._chosen if one[0] != rows]
        self._chosen = tuple(sorted([*others, (rows, step)], key=lambda one: one[0]))

    def chosen(self, rows: int) -> StepLaunch:
        """PLAIN_STEP for more rows than were measured."""
        return next((step for most, step in self._chosen if rows <= most), PLAIN_STEP)

    @contextmanager
    def during(self, step: StepLaunch) -> Iterator[None]:
        """Launches kernels so until it ends."""
        before, self._step = self._step, step
        try:
            yield
        finally:
            self._step = before

    @property
    def fused_norms(self) -> bool:
        return self._step.fused_norms

    @property
    def _now(self) -> DependentLaunch | None:
        return self._step.overlap

    @property
    def product(self) -> Options:
        """Of a launch that takes its time."""
        return _options(ALONE if self._now is None else DEPENDENT)

    @property
    def small(self) -> Options:
        """Of a launch that leaves most of the device idle."""
        if self._now is None:
            return _options(ALONE)
        return _options(EARLY if self._now.early else DEPENDENT)

    @property
    def lines(self) -> bool:
        """Whether dense products ask for weights line by line."""
        return self._now is not None and self._now.lines

    def prefetched(self, rows: int, row_bytes: int) -> int:
        """Bytes of each of so many rows of weights, which have `row_bytes` for a program."""
        if self._now is None or not self._now.prefetch:
            return 0
        wanted = -(-self._now.prefetch // rows)
        rounded = -(-wanted // PREFETCH_MULTIPLE) * PREFETCH_MULTIPLE
        size = min(rounded, row_bytes // PREFETCH_MULTIPLE * PREFETCH_MULTIPLE)
        return size if rows * size <= MOST_PREFETCHED else 0


def _options(how: int) -> Options:
    """The attribute and the wait that it needs, never one without the other."""
    return {"DEPENDENT": how} if how == ALONE else {"DEPENDENT": how, "launch_pdl": True}
