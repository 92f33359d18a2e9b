"""A rank other than the first: holds its part of the model and does what it is told, in order."""

import logging
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ..attention.base import LayerCache
from ..attention.memory import host_blocks, move_blocks
from ..config import EngineConfig
from ..errors import ConfigError
from ..kv_budget import count_blocks
from ..lora.device import DeviceLoRA
from ..lora.packing import by_layer, packed_length, unpack
from ..model.cuda_graphs import Decodes, graph_bytes, with_graphs
from ..model.parallel import Shard
from ..placement import PlacedModel, place_model
from ..transfer import Transfer
from . import commands
from .commands import Gone, Verb
from .group import Group

logger = logging.getLogger(__name__)


class Rank:
    """Used by one thread. `store` is where the ranks meet."""

    def __init__(
        self,
        config: EngineConfig,
        placed: PlacedModel,
        group: Group,
        store: Path,
        connection: Connection,
    ) -> None:
        self._config, self._placed, self._group = config, placed, group
        self._model = placed.model
        self._store, self._connection = store, connection
        self._caches: tuple[LayerCache, ...] = ()
        self._host: tuple[LayerCache, ...] = ()
        self._graph_bytes = 0
        self._lora: DeviceLoRA | None = None
        self._verbs: dict[Verb, Callable[[list[int]], None]] = {
            Verb.FORWARD: self._forward,
            Verb.ALLOCATE: self._allocate,
            Verb.RESERVE: self._reserve,
            Verb.COPY: self._copy,
            Verb.SWAP_OUT: self._swap_out,
            Verb.SWAP_IN: self._swap_in,
            Verb.MEASURE: self._measure,
            Verb.CONNECT: self._connect,
            Verb.RECORD: self._record,
            Verb.REHEARSE: self._rehearse,
            Verb.ADAPT: self._adapt,
            Verb.MAKE_ROOM: self._make_room,
        }

    def serve(self) -> None:
        """Until rank 0 says so. Raises Gone where that has ended, or what a step raises."""
        with torch.inference_mode():
            self._obey_until(Verb.STOP)

    def _obey_until(self, last: Verb) -> None:
        while True:
            verb, numbers = commands.receive(self._connection)
            if verb is last:
                return
            if verb is Verb.STOP:
                raise Gone
            self._verbs[verb](numbers)

    def _connect(self, _: list[int]) -> None:
        self._group.connect(self._store)
        commands.answer(self._connection)

    def _forward(self, numbers: list[int]) -> None:
        sizes, runs = numbers[: commands.SIZES], numbers[commands.SIZES :]
        device, layout = self._placed.device, self._placed.layout
        length = commands.packed_length(sizes, layout.groups.count)
        packed = torch.empty(length, dtype=torch.int32, device=device)
        batch = commands.unpack(sizes, self._group.broadcast(packed), layout)
        if runs:
            batch = replace(batch, lora=self._adapters.batch(commands.row_owners(runs)))
        self._model.forward(batch, self._caches)

    def _record(self, numbers: list[int]) -> None:
        self._model = with_graphs(self._decodes(numbers[0]))

    def _rehearse(self, numbers: list[int]) -> None:
        self._graph_bytes = graph_bytes(self._decodes(numbers[0]))

    def _decodes(self, max_model_len: int) -> Decodes:
        placed, lora = self._placed, None if self._lora is None else self._lora.static
        return Decodes(
            placed.model,
            placed.attention,
            self._caches,
            self._config,
            max_model_len,
            lora,
            placed.layout,
        )

    def _make_room(self, numbers: list[int]) -> None:
        """Compiles what it needs before steps come that others would wait in."""
        placed = self._placed
        self._lora = DeviceLoRA(self._config, placed, bool(numbers[0]), Transfer(placed.device))
        self._lora.warm_up()

    def _adapt(self, numbers: list[int]) -> None:
        slot, *ranks = numbers
        placed = self._placed
        for index, (layer, own) in enumerate(by_layer(self._adapters.shapes, ranks)):
            packed = torch.empty(
                packed_length(layer, own), dtype=placed.dtype, device=placed.device
            )
            if any(own):
                self._group.broadcast(packed)
            self._adapters.slots.put_layer(slot, index, unpack(layer, own, packed))

    @property
    def _adapters(self) -> DeviceLoRA:
        assert self._lora is not None, "room was made for them before"
        return self._lora

    def _allocate(self, numbers: list[int]) -> None:
        self._caches = ()
        self._caches = self._placed.allocate(numbers[0], self._config.block_size)

    def _reserve(self, numbers: list[int]) -> None:
        self._host = tuple(host_blocks(cache, numbers[0]) for cache in self._caches)

    def _copy(self, numbers: list[int]) -> None:
        self._placed.copy_blocks(self._caches, commands.paired(numbers))

    def _swap_out(self, numbers: list[int]) -> None:
        for cache, host in zip(self._caches, self._host, strict=True):
            move_blocks(cache, host, commands.paired(numbers))

    def _swap_in(self, numbers: list[int]) -> None:
        for cache, host in zip(self._caches, self._host, strict=True):
            move_blocks(host, cache, commands.paired(numbers))

    def _measure(self, numbers: list[int]) -> None:
        per_block = self._placed.block_bytes(self._config.block_size)
        sequence = self._placed.sequence_blocks(self._config.block_size, numbers[0])
        device = self._placed.device
        try:
            blocks = count_blocks(self._config, device, per_block, sequence, self._profile)
        except ConfigError as error:
            logger.warning("no room for the KV cache", extra={"error": str(error)})
            blocks = 0
        commands.answer(self._connection, blocks)

    def _profile(self) -> int:
        self._obey_until(Verb.MEASURED)
        self._caches = ()
        return self._graph_bytes


def serve(rank: int, size: int, connection: Connection, greeting: dict[str, Any]) -> int:
    """Loads what the greeting names and serves; returns the process's exit code."""
    try:
        config = EngineConfig(**greeting["config"])
        group = Group(rank, size, greeting["device"])
        placed = place_model(config, Shard(rank, size, group))
        commands.answer(connection)
        Rank(config, placed, group, Path(greeting["store"]), connection).serve()
    except Gone:
        return 0
    except Exception as error:
        logger.exception("a rank of the engine failed")
        commands.answer(connection, problem=f"{type(error).__name__}: {error}")
        return 1
    return 0
