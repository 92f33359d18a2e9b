"""The adapters that an engine knows, by name, and which of them are in host memory.

An adapter of the settings is checked when it is added and read when it is first needed. One that is
loaded while the engine serves is read in another thread and then installed between two steps.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core.errors import CheckpointError
from .adapter import AdapterFile, AdapterWeights, digest_of
from .shapes import LayerShapes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that was read completely. `digest` is that of its files (`digest_of`)."""

    file: AdapterFile
    weights: AdapterWeights
    digest: str


class Adapters(Mapping[str, Path]):
    """Folders by name. Host memory holds `capacity` adapters, the most recently used ones.

    Only `add` and `read` may be called outside the thread that runs the model.
    """

    def __init__(
        self, shapes: Sequence[LayerShapes], max_rank: int, dtype: torch.dtype, capacity: int
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
        """Adds an adapter. A name keeps its folder, because KV is cached under the name.

        Raises CheckpointError or ConfigError for one that cannot be served.
        """
        known = self._known.get(name)
        if known is None:
            self._known[name] = self._checked(AdapterFile(folder, self._shapes, self._max_rank))
            logger.info("adapter registered", extra={"adapter": name})
        elif known.folder != folder:
            raise CheckpointError(
                f"adapter {name!r} is {known.folder}: give {folder} a name of its own"
            )

    def read(self, folder: Path) -> LoadedAdapter:
        """Reads and checks an adapter, which then can be installed.

        Raises CheckpointError or ConfigError for one that cannot be served.
        """
        file = self._checked(AdapterFile(folder, self._shapes, self._max_rank))
        digest = digest_of(folder)
        weights = file.load(self._dtype)
        if digest_of(folder) != digest:
            raise CheckpointError(
                f"{folder}: its files changed while they were read; load it again"
            )
        return LoadedAdapter(file, weights, digest)

    def install(self, name: str, adapter: LoadedAdapter) -> None:
        """Adds an adapter under a name that is not known yet."""
        assert name not in self._known, "KV is cached under the name"
        self._known[name] = adapter.file
        self._keep(name, adapter.weights)
        logger.info("adapter loaded", extra={"adapter": name})

    def remove(self, name: str) -> None:
        """Forgets an adapter that no request uses."""
        if self._known.pop(name, None) is not None:
            self._loaded.pop(name, None)
            logger.info("adapter removed", extra={"adapter": name})

    @property
    def change_experts(self) -> bool:
        """Whether a known adapter changes experts."""
        return any(file.changes_experts for file in self._known.values())

    def refuse_experts(self) -> None:
        """Refuses adapters that change the experts of mixtures, from now on."""
        self._takes_experts = False

    def _checked(self, file: AdapterFile) -> AdapterFile:
        if file.changes_experts and not self._takes_experts:
            raise CheckpointError(
                f"{file.path} changes experts, for which room is taken only when the engine "
                "starts: set lora_experts, or name such an adapter in lora_modules"
            )
        return file

    def load(self, name: str) -> AdapterWeights:
        """Returns an adapter's weights in host memory. Raises CheckpointError if they cannot be
        read."""
        weights = self._loaded.pop(name, None)
        if weights is None:
            weights = self._known[name].load(self._dtype)
            self.loads += 1
        self._keep(name, weights)
        return weights

    def _keep(self, name: str, weights: AdapterWeights) -> None:
        """Keeps an adapter as the one that was used last."""
        while len(self._loaded) >= self._capacity:
            del self._loaded[next(iter(self._loaded))]
        self._loaded[name] = weights
