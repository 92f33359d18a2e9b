"""The adapters that an engine knows, by name, and those of them that are in host memory.

An adapter is checked when it becomes known and read when it is first needed.
"""

import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Rows
from pathlib import Path

import torch

from ..errors import CheckpointError
from .adapter import AdapterFile, AdapterWeights
from .shapes import LayerShapes

logger = logging.getLogger(__name__)


class Adapters(Mapping[str, Path]):
    """Folders by name. `capacity` are kept in host memory, those used last.

    All but `add` belongs to the thread that runs the model.
    """

    def __init__(
        self, shapes: Rows[LayerShapes], max_rank: int, dtype: torch.dtype, capacity: int
    ) -> None:
        self._shapes, self._max_rank, self._dtype = shapes, max_rank, dtype
        self._takes_experts = True
        self._capacity = capacity
        self._known: dict[str, AdapterFile] = {}
        self._loaded: dict[str, AdapterWeights] = {}
        self.loads = 0

    def __getitem__(self, name: str) -> Path:
        return self._known[name].folder

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def add(self, name: str, folder: Path) -> None:
        """Makes an adapter known. A name stays with its folder, as KV is cached under the name.

        Raises CheckpointError or ConfigError for one that cannot be served.
        """
        known = self._known.get(name)
        if known is None:
            self._known[name] = self._checked(AdapterFile(folder, self._shapes, self._max_rank))
            logger.info("adapter known", extra={"adapter": name})
        elif known.folder != folder:
            raise CheckpointError(
                f"adapter {name!r} is {known.folder}: give {folder} a name of its own"
            )

    @property
    def change_experts(self) -> bool:
        """Whether one of those that are known does."""
        return any(file.changes_experts for file in self._known.values())

    def refuse_experts(self) -> None:
        """From now on adapters may not change the experts of mixtures."""
        self._takes_experts = False

    def _checked(self, file: AdapterFile) -> AdapterFile:
        if file.changes_experts and not self._takes_experts:
            raise CheckpointError(
                f"{file.path} changes experts, for which room is taken only when the engine "
                "starts: name it, or another one that does, in lora_modules"
            )
        return file

    def load(self, name: str) -> AdapterWeights:
        """An adapter's weights on the host. Raises CheckpointError where they cannot be read."""
        weights = self._loaded.pop(name, None)
        if weights is None:
            weights = self._known[name].load(self._dtype)
            self.loads += 1
            while len(self._loaded) >= self._capacity:
                del self._loaded[next(iter(self._loaded))]
        self._loaded[name] = weights
        return weights
