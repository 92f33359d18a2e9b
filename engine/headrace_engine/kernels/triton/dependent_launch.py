"""Programmatic dependent launch (Hopper and newer): which kernels begin while earlier kernels end,
and whether norms are separate launches. Dependent launches are on only while a step is recorded for
which they were measured to be faster (`autotune.steps`); other steps launch kernels one after the
other."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# How a kernel is compiled: without dependent launch; or such that the next kernel may begin once
# this one has waited; or such that it may begin immediately.
ALONE, DEPENDENT, EARLY = 0, 1, 2
# Prefetched bytes of weights: a multiple of this for each row of a tile, and at most a third of
# Hopper's L2 cache in total.
PREFETCH_MULTIPLE = 256
MOST_PREFETCHED = 16 << 20

# Triton takes both as options and constants of a launch.
Options = dict[str, int]


@dataclass(frozen=True, slots=True)
class DependentLaunch:
    """Products prefetch about `prefetch` bytes of their weights into the L2 cache before they wait,
    in cache `lines` or in longer stretches. If `early`, kernels without products let the next one
    begin before they wait."""

    prefetch: int = 0
    early: bool = False
    lines: bool = False


@dataclass(frozen=True, slots=True)
class StepLaunch:
    """How kernels overlap (None: not at all), whether norms are fused into the products around
    them, if the model supports it, and whether all products of few rows are this project's kernels:
    those of cuBLAS do not overlap."""

    overlap: DependentLaunch | None = None
    fused_norms: bool = False
    own_products: bool = False


PLAIN_STEP = StepLaunch()


class DependentLaunches:
    """How one model's kernels are launched at the moment.

    Only the thread that runs steps uses it.
    """

    def __init__(self) -> None:
        self._chosen: tuple[tuple[int, StepLaunch], ...] = ()
        self._step = PLAIN_STEP

    def choose(self, rows: int, step: StepLaunch) -> None:
        """Sets the launches of recorded steps of up to `rows` rows, and more than the bound before
        it."""
        others = [one for one in self._chosen if one[0] != rows]
        self._chosen = tuple(sorted([*others, (rows, step)], key=lambda one: one[0]))

    def chosen(self, rows: int) -> StepLaunch:
        """The chosen launches; PLAIN_STEP for more rows than were measured."""
        return next((step for most, step in self._chosen if rows <= most), PLAIN_STEP)

    @contextmanager
    def during(self, step: StepLaunch) -> Iterator[None]:
        """Launches kernels as `step` says until the block ends."""
        before, self._step = self._step, step
        try:
            yield
        finally:
            self._step = before

    @property
    def fused_norms(self) -> bool:
        return self._step.fused_norms

    @property
    def own_products(self) -> bool:
        return self._step.own_products

    @property
    def _now(self) -> DependentLaunch | None:
        return self._step.overlap

    @property
    def product(self) -> Options:
        """Options for the launch of a long kernel."""
        return _options(ALONE if self._now is None else DEPENDENT)

    @property
    def small(self) -> Options:
        """Options for the launch of a kernel that leaves most of the device idle."""
        if self._now is None:
            return _options(ALONE)
        return _options(EARLY if self._now.early else DEPENDENT)

    @property
    def lines(self) -> bool:
        """Whether dense products prefetch weights line by line."""
        return self._now is not None and self._now.lines

    def prefetched(self, rows: int, row_bytes: int) -> int:
        """Bytes to prefetch of each of `rows` rows of weights, of which a program reads
        `row_bytes`."""
        if self._now is None or not self._now.prefetch:
            return 0
        wanted = -(-self._now.prefetch // rows)
        rounded = -(-wanted // PREFETCH_MULTIPLE) * PREFETCH_MULTIPLE
        size = min(rounded, row_bytes // PREFETCH_MULTIPLE * PREFETCH_MULTIPLE)
        return size if rows * size <= MOST_PREFETCHED else 0


def _options(how: int) -> Options:
    """The launch attribute together with the wait that it needs."""
    return {"DEPENDENT": how} if how == ALONE else {"DEPENDENT": how, "launch_pdl": True}
