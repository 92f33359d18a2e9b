"""The parts of gpu.py: their measurements, the engines that they use, and where results are
written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .engine import Bench
from .shapes import SHAPES, Roofs, Shape
from .sizes import Sizes

Report = Callable[..., None]
# The most tokens of a step.
BUDGET = 8192
# The number of decode steps in a profile.
PROFILED = 6


@dataclass(frozen=True)
class Task:
    """`out` is for results, `work` for all else. `measured` has the device's rooflines, None before
    they are measured. `engine` are options for all engines; `done` are results that an earlier try
    has reported."""

    model: str
    sizes: Sizes
    out: Path
    work: Path
    measured: Roofs | None
    engine: Mapping[str, Any]
    done: frozenset[str] = frozenset()

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model]

    @property
    def roofs(self) -> Roofs:
        if self.measured is None:
            raise RuntimeError("the device's roofs have not been measured")
        return self.measured

    @property
    def folder(self) -> Path:
        return self.work / "models" / self.model

    @property
    def tuned(self) -> Path:
        """The folder in which engines share their measurements."""
        return self.work / "tuned"

    def bench(self, **options: Any) -> Bench:
        wanted = {
            "max_num_seqs": self.sizes.max_num_seqs,
            "max_num_batched_tokens": BUDGET,
            "tuned_config_folder": str(self.tuned),
            **self.shape.engine_options(),
            **self.sizes.engine,
            **self.engine,
            **options,
        }
        return Bench(self.folder, self.shape, self.sizes.device, **wanted)
