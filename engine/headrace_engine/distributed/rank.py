"""A rank other than the first: holds its part of the model and carries out commands in order."""

import logging
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ..attention.memory import host_blocks, move_blocks
from ..core.attention_backend import LayerCache
from ..core.config import EngineConfig
from ..core.errors import ConfigError
from ..core.kv_cache_groups import ONE_GROUP
from ..core.recurrent_state import StateBatch
from ..cuda_graphs.cuda_graphs import DecodeRecorder, measure_graphs, record_graphs
from ..device.transfer import Transfer
from ..kv_cache.memory_budget import count_blocks
from ..lora.device import DeviceLoRA
from ..lora.packing import by_layer, packed_length, unpack
from ..model_loader.loader import place_model
from ..models.base import VisionRows
from ..models.draft_heads.base import DraftHead
from ..models.parallel import Shard
from ..models.placed_model import PlacedModel
from . import commands
from .commands import Command, Disconnected
from .group import Group, open_store
from .node_greeting import read_settings

logger = logging.getLogger(__name__)


class Rank:
    """One rank's part of the model and its caches. One thread uses it. The ranks
    meet by `meeting`, and `host` is their address (see Group.connect)."""

    def __init__(
        self,
        config: EngineConfig,
        placed: PlacedModel,
        group: Group,
        meeting: Path | Connection,
        host: str | None,
        connection: Connection,
    ) -> None:
        self._config, self._placed, self._group = config, placed, group
        self._model = placed.model
        self._meeting, self._address, self._connection = meeting, host, connection
        self._caches: tuple[LayerCache, ...] = ()  # of the model, then of the draft head
        self._host: tuple[LayerCache, ...] = ()
        self._graph_bytes = 0
        self._vision: VisionRows | None = None  # of the next step
        self._states: StateBatch | None = None  # of the next step
        self._lora: DeviceLoRA | None = None
        self._handlers: dict[Command, Callable[[list[int]], None]] = {
            Command.FORWARD: self._forward,
            Command.IMAGES: self._receive_images,
            Command.ALLOCATE: self._allocate,
            Command.RESERVE: self._reserve,
            Command.COPY: self._copy,
            Command.STATES: self._receive_states,
            Command.ZERO: self._zero,
            Command.SWAP_OUT: self._swap_out,
            Command.SWAP_IN: self._swap_in,
            Command.MEASURE: self._measure,
            Command.CONNECT: self._connect,
            Command.RECORD: self._record,
            Command.PUT_ADAPTER: self._put_adapter,
            Command.ALLOCATE_ADAPTERS: self._allocate_adapters,
            Command.HEAD: self._run_head,
            Command.HEAD_LOGITS: self._make_head_logits,
            Command.COPY_HEAD: self._copy_head,
        }

    def serve(self) -> None:
        """Carries out commands until STOP. Raises Disconnected if rank 0 has ended, or a step's
        exception."""
        with torch.inference_mode():
            self._serve_until(Command.STOP)

    def _serve_until(self, last: Command) -> None:
        while True:
            command, numbers = commands.receive(self._connection)
            if command is last:
                return
            if command is Command.STOP:
                raise Disconnected
            self._handlers[command](numbers)

    def _connect(self, _: list[int]) -> None:
        self._group.connect(open_store(self._meeting, self._group.size), self._address)
        commands.answer(self._connection)

    def _forward(self, numbers: list[int]) -> None:
        sizes, runs = numbers[: commands.SIZES], numbers[commands.SIZES :]
        device, layout = self._placed.device, self._placed.layout
        length = commands.packed_length(sizes, layout.groups.count)
        packed = torch.empty(length, dtype=torch.int32, device=device)
        batch = commands.unpack(sizes, self._group.broadcast(packed), layout)
        if runs:
            batch = replace(batch, lora=self._adapters.batch(commands.row_owners(runs)))
        if self._vision is not None:
            batch, self._vision = replace(batch, vision=self._vision), None
        if self._states is not None:
            batch, self._states = replace(batch, states=self._states), None
        self._model.forward(batch, self._model_caches)

    @property
    def _model_caches(self) -> tuple[LayerCache, ...]:
        return self._caches[: len(self._placed.model.kv_shapes)]

    @property
    def _head_caches(self) -> tuple[LayerCache, ...]:
        return self._caches[len(self._placed.model.kv_shapes) :]

    @property
    def _head(self) -> DraftHead:
        assert self._placed.draft_head is not None, "rank 0 has a draft head"
        return self._placed.draft_head

    def _run_head(self, numbers: list[int]) -> None:
        width, *sizes = numbers
        placed = self._placed
        length = commands.packed_length(sizes, ONE_GROUP.groups.count)
        packed = torch.empty(length, dtype=torch.int32, device=placed.device)
        batch = commands.unpack(sizes, self._group.broadcast(packed), ONE_GROUP)
        hidden = self._received(len(batch.input_ids), width)
        self._head.forward(batch, hidden, self._head_caches)

    def _make_head_logits(self, numbers: list[int]) -> None:
        rows, width = numbers
        self._head.logits(self._received(rows, width))

    def _copy_head(self, numbers: list[int]) -> None:
        self._placed.copy_head_blocks(self._head_caches, commands.paired(numbers))

    def _received(self, rows: int, width: int) -> torch.Tensor:
        """Rows [rows, width] that rank 0 broadcasts."""
        made = torch.empty(rows, width, dtype=self._placed.dtype, device=self._placed.device)
        return self._group.broadcast(made)

    def _receive_images(self, numbers: list[int]) -> None:
        placed = self._placed
        self._vision = commands.empty_vision(numbers, placed.dtype, placed.device)
        for tensor in commands.tensors_of(self._vision):
            self._group.broadcast(tensor)

    def _receive_states(self, numbers: list[int]) -> None:
        length, device = commands.packed_states_length(numbers), self._placed.device
        packed = torch.empty(length, dtype=torch.int32, device=device)
        self._states = commands.unpack_states(numbers, self._group.broadcast(packed))

    def _record(self, numbers: list[int]) -> None:
        max_model_len, keep = numbers
        recorder = self._recorder(max_model_len)
        if keep:
            self._model = record_graphs(recorder)
        else:
            self._graph_bytes = measure_graphs(recorder)

    def _recorder(self, max_model_len: int) -> DecodeRecorder:
        placed, lora = self._placed, None if self._lora is None else self._lora.static
        return DecodeRecorder(
            placed.model,
            placed.attention,
            self._model_caches,
            self._config,
            max_model_len,
            lora,
            placed.layout,
        )

    def _allocate_adapters(self, numbers: list[int]) -> None:
        """Takes memory for adapters and compiles their kernels, so that no step waits for it."""
        placed = self._placed
        assert placed.lora_shapes is not None, "rank 0 has adapters"
        self._lora = DeviceLoRA(
            self._config,
            placed.lora_shapes,
            placed.ops,
            placed.dtype,
            Transfer(placed.device),
            experts=bool(numbers[0]),
        )
        self._lora.warm_up()

    def _put_adapter(self, numbers: list[int]) -> None:
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
        assert self._lora is not None, "memory for adapters is allocated before they are used"
        return self._lora

    def _allocate(self, numbers: list[int]) -> None:
        self._caches = ()
        num_blocks, head_blocks = numbers
        self._caches = self._placed.allocate(num_blocks, self._config.block_size, head_blocks)

    def _reserve(self, numbers: list[int]) -> None:
        self._host = tuple(host_blocks(cache, numbers[0]) for cache in self._caches)

    def _zero(self, numbers: list[int]) -> None:
        self._placed.zero_blocks(self._caches, tuple(numbers))

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
        self._serve_until(Command.MEASURED)
        self._caches = ()
        return self._graph_bytes


def serve(
    rank: int,
    size: int,
    connection: Connection,
    greeting: dict[str, Any],
    store: Connection | None = None,
) -> int:
    """Loads the part that the greeting names and serves; returns the process's exit code. `store`
    leads to node 0's store, if this is another node."""
    try:
        config = read_settings(greeting["config"])
        group = Group(rank, size, greeting["device"])
        placed = place_model(config, Shard(rank, size, group, config.enable_expert_parallel))
        commands.answer(connection)
        meeting = Path(greeting["store"]) if store is None else store
        Rank(config, placed, group, meeting, greeting["host"], connection).serve()
    except Disconnected:
        return 0
    except Exception as error:
        logger.exception("a rank of the engine failed")
        commands.answer(connection, problem=f"{type(error).__name__}: {error}")
        return 1
    return 0
