"""One curve: a cost over the size of what causes it."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# Timings vary by this much; a cost that grows with the size itself has the exponent 1.
LINEAR = 1.1


@dataclass(slots=True)
class Curve:
    """A `cost` in `unit` over `size`; `limit` is the goal that no point may exceed."""

    name: str
    size: str
    cost: str
    unit: str
    limit: float | None = None
    points: list[tuple[int, float]] = field(default_factory=list)

    def add(self, size: int, cost: float) -> None:
        """Adds a point, and shows that it was measured."""
        self.points.append((size, cost))
        print(f"{self.name}: {size:,}: {cost:,.4g} {self.unit}", file=sys.stderr, flush=True)

    @property
    def exponent(self) -> float | None:
        """The steepest growth over a factor of at least four in size, d log cost / d log size; None
        where sizes differ by less."""
        pairs = (
            math.log(later[1] / first[1]) / math.log(later[0] / first[0])
            for at, first in enumerate(self.points)
            for later in self.points[at + 1 :]
            if later[0] >= 4 * first[0] > 0 and first[1] > 0 < later[1]
        )
        return max(pairs, default=None)

    @property
    def verdict(self) -> str:
        if self.exponent is None:
            return ""
        if self.exponent <= 0.1:
            return "constant"
        return "linear or better" if self.exponent <= LINEAR else "worse than linear"

    def report(self) -> dict[str, Any]:
        return {**asdict(self), "exponent": self.exponent, "verdict": self.verdict}


def curve_of(report: Mapping[str, Any]) -> Curve:
    """The curve of a report."""
    fields = {name: report[name] for name in ("name", "size", "cost", "unit", "limit")}
    return Curve(**fields, points=[(int(size), float(cost)) for size, cost in report["points"]])


def up_to(most: int, sizes: Sequence[int]) -> list[int]:
    """The sizes that are at most `most`, and at least the first one."""
    return [size for size in sizes if size <= most] or [sizes[0]]
