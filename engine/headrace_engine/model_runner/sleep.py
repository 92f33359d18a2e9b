"""What a sleeping model runner gives back: the memory of KV, and of weights.

    level 1    KV is lost; weights stay in host memory
    level 2    KV is lost; weights are dropped, and read from the checkpoint again

On CPUs weights are in host memory anyway, so level 1 gives back the memory of KV alone.
"""

import logging
from collections.abc import Iterable, Sequence

import torch

from ..checkpoints.checkpoint import load_checkpoint
from ..checkpoints.fingerprint import FileStamps, file_stamps
from ..core.attention_backend import LayerCache
from ..core.config import EngineConfig, SleepLevel
from ..core.errors import CheckpointError
from ..device.released_memory import ReleasedMemory, collect, tensors_of

logger = logging.getLogger(__name__)


class Sleep:
    """The memory that one runner has given back. Made when the model has just been loaded."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._stamps = self._read_stamps()
        self._released: ReleasedMemory | None = None
        # Whether the weights were dropped.
        self.dropped = False

    def begin(
        self,
        level: SleepLevel,
        device: torch.device,
        kept: Iterable[object],
        caches: Sequence[LayerCache],
    ) -> None:
        """Gives the memory of `caches` back, and on a GPU that of all tensors to which `kept` lead.

        At level 2 nothing may refer to the model any more.
        """
        self.dropped = level == 2
        if self.dropped:
            collect()
        lost = [part for cache in caches for part in cache]
        self._released = ReleasedMemory(device, kept=tensors_of(*kept), lost=lost)

    def check(self) -> None:
        """Raises CheckpointError if the files are not those that were loaded first: other engines,
        and KV in other tiers, have the old weights."""
        if self._read_stamps() != self._stamps:
            raise CheckpointError(
                f"{self._config.model}: its files have changed while the engine slept: restart it"
            )

    def end(self) -> None:
        """Takes the memory again."""
        assert self._released is not None, "the runner does not sleep"
        self._released.restore()
        self._released, self.dropped = None, False

    def _read_stamps(self) -> FileStamps:
        return file_stamps(load_checkpoint(self._config.model, self._config.revision).folder)
