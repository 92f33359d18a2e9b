"""Rank 0's side of the other ranks: it announces each action, and all ranks do it together.

Only the runner's thread may call this module.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ..core.config import EngineConfig
from ..core.errors import RankFailed
from ..core.kv_cache_groups import ONE_GROUP, KVLayout
from ..core.start_phases import OnPhase, ignore_phase
from ..kv_cache.memory_budget import Profile
from ..lora.adapter import AdapterWeights
from ..lora.packing import by_layer, pack, ranks_of
from ..lora.shapes import LayerShapes
from ..models.base import ForwardBatch
from . import commands
from .commands import Command, Disconnected, Pairs
from .group import Group, open_store
from .node_greeting import rank_settings
from .process import Launcher, RankHandle, RankProcess
from .rank_failure import OnFailure, RankFailure
from .remote_nodes import RemoteNodes, RemoteRank

# Seconds for a rank to end by itself, and to notice a broken connection.
GRACE = 10.0
# Seconds for a rank with a broken connection to end, on a very busy machine.
LONG_GRACE = 60.0
STORE = "meeting"


class RankProcesses:
    """Starts the other ranks of this node, which load their parts meanwhile, once all other nodes
    have joined. All end with this object, or with `close`."""

    def __init__(
        self,
        config: EngineConfig,
        device: str,
        launch: Launcher = RankProcess,
        on_phase: OnPhase = ignore_phase,
    ) -> None:
        """`device` is a device type: cpu or cuda. Raises ConfigError if other nodes cannot join."""
        size = config.tensor_parallel_size
        self.group = Group(0, size, device)
        self._device = device
        self._rank_failure = RankFailure(self.group.abort)
        self._nodes: RemoteNodes | None = None
        if config.nnodes > 1:
            self._nodes = RemoteNodes(config, device, self._rank_failure.lost)
        self._handles: list[RankHandle] = []
        self._folder = TemporaryDirectory(prefix="headrace-ranks-")
        ranks = (self._handles, self._folder, self._nodes)
        self._end = weakref.finalize(self, _end, self._rank_failure, *ranks)
        if self._nodes is not None:
            on_phase("nodes")
            self._nodes.gather()
        self._host = None if self._nodes is None else self._nodes.host
        for rank in range(1, size):
            self._handles.append(self._start(rank, config, launch))

    def _start(self, rank: int, config: EngineConfig, launch: Launcher) -> RankHandle:
        handle: RankHandle
        if self._nodes is None or rank < config.ranks_per_node:
            handle = launch(rank, config.tensor_parallel_size, self._rank_failure.ended)
        else:
            handle = self._nodes.rank(rank)
        greeting = {
            "config": {**rank_settings(config), **handle.settings},
            "device": self._device,
            "store": str(self._store),
            "host": handle.host or self._host,
            "level": logging.getLogger().getEffectiveLevel(),
        }
        with suppress(OSError):  # a rank that has ended is noticed in `connect`
            commands.introduce(handle.commands, greeting)
        return handle

    @property
    def handles(self) -> Sequence[RankHandle]:
        return tuple(self._handles)

    @property
    def _store(self) -> Path:
        return Path(self._folder.name) / STORE

    def connect(self) -> None:
        """Waits until all ranks have loaded, then joins them into a group. Raises RankFailed."""
        with self.step():
            self._answers()
            self._tell(Command.CONNECT)
            store = open_store(self._store, self.group.size)
            for handle in self._handles:
                if isinstance(handle, RemoteRank):
                    handle.serve_store(store)
            self.group.connect(store, self._host)
            self._answers()
        if self.group.file_done:
            self._folder.cleanup()
        if self._nodes is not None:
            self._nodes.connected()

    def on_drain(self, callback: Callable[[], object]) -> None:
        """Calls `callback`, from any thread, when another node is told to end."""
        if self._nodes is not None:
            self._nodes.on_drain(callback)

    def watch(self, on_failure: OnFailure) -> None:
        """Calls `on_failure`, from any thread, when a rank or node fails, whether or not a
        step is waiting."""
        self._rank_failure.watch(on_failure)

    def close(self) -> None:
        """Ends the ranks. No step may follow."""
        self._end()

    def fail(self, error: BaseException) -> None:
        """Ends the ranks, and other nodes with an error: this rank cannot continue."""
        if self._nodes is not None:
            self._nodes.fail(f"node 0 failed: {type(error).__name__}: {error}")
        self.close()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Encloses an action of all ranks. If this rank fails in it, all ranks end, since they
        would wait indefinitely. Raises RankFailed if another rank stopped."""
        self._rank_failure.check()
        try:
            yield
        except (OSError, RuntimeError, Disconnected) as error:
            failure = self._failure()
            self.fail(failure or error)
            if failure is not None or isinstance(error, Disconnected):
                raise RankFailed(str(failure or "a rank of the engine is gone")) from error
            raise
        except BaseException as error:
            self.fail(error)
            raise

    def _failure(self) -> RankFailed | None:
        """Waits for the end of another rank: its connection breaks before its process ends."""
        if not wait([handle.commands for handle in self._handles], GRACE):
            return None
        return self._rank_failure.wait(LONG_GRACE)

    def forward(self, batch: ForwardBatch, layout: KVLayout) -> None:
        if batch.vision is not None:
            self._tell(Command.IMAGES, commands.numbers_of(batch.vision))
            for tensor in commands.tensors_of(batch.vision):
                self.group.broadcast(tensor.contiguous())
        if batch.states is not None:
            self._tell(Command.STATES, commands.numbers_of_states(batch.states))
            self.group.broadcast(commands.packed_states(batch.states))
        runs = commands.adapter_runs(batch.lora)
        self._tell(Command.FORWARD, (*commands.sizes_of(batch), *runs))
        self.group.broadcast(commands.pack(batch, layout))

    def record(self, max_model_len: int, keep: bool) -> None:
        self._tell(Command.RECORD, (max_model_len, int(keep)))

    def allocate_adapters(self, experts: bool) -> None:
        with self.step():
            self._tell(Command.ALLOCATE_ADAPTERS, (int(experts),))

    def put_adapter(
        self, slot: int, shapes: Sequence[LayerShapes], weights: AdapterWeights
    ) -> None:
        """Sends one decoder layer at a time, as an adapter may be larger than the free memory."""
        ranks = ranks_of(shapes, weights)
        with self.step():
            self._tell(Command.PUT_ADAPTER, (slot, *ranks))
            for (layer, own), modules in zip(by_layer(shapes, ranks), weights, strict=True):
                if any(own):
                    self.group.broadcast(pack(layer, own, modules).to(self._device))

    def run_head(self, batch: ForwardBatch, hidden: torch.Tensor) -> None:
        self._tell(Command.HEAD, (hidden.shape[1], *commands.sizes_of(batch)))
        self.group.broadcast(commands.pack(batch, ONE_GROUP))
        self.group.broadcast(hidden.contiguous())

    def make_head_logits(self, normed: torch.Tensor) -> None:
        self._tell(Command.HEAD_LOGITS, normed.shape)
        self.group.broadcast(normed.contiguous())

    def copy_head_blocks(self, copies: Pairs) -> None:
        with self.step():
            self._tell(Command.COPY_HEAD, tuple(commands.flat(copies)))

    def allocate(self, num_blocks: int, head_blocks: int) -> None:
        with self.step():
            self._tell(Command.ALLOCATE, (num_blocks, head_blocks))

    def reserve_host(self, num_blocks: int) -> None:
        with self.step():
            self._tell(Command.RESERVE, (num_blocks,))

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        with self.step():
            self._tell(Command.ZERO, blocks)

    def copy_blocks(self, copies: Pairs) -> None:
        with self.step():
            self._tell(Command.COPY, tuple(commands.flat(copies)))

    def swap(self, swap_out: Pairs, swap_in: Pairs) -> None:
        with self.step():
            if swap_out:
                self._tell(Command.SWAP_OUT, tuple(commands.flat(swap_out)))
            if swap_in:
                self._tell(Command.SWAP_IN, tuple(commands.flat(swap_in)))

    def smallest(
        self,
        count: Callable[[Profile], int],
        profile: Profile,
        max_model_len: int,
    ) -> int:
        """The smallest result of `count(profile)` on any rank; all ranks profile the same run."""

        def profile_all() -> int:
            later = profile()
            self._tell(Command.MEASURED)
            return later

        with self.step():
            self._tell(Command.MEASURE, (max_model_len,))
            own = count(profile_all)
            return min(own, *self._answers())

    def _answers(self) -> list[int]:
        return [commands.await_answer(one.commands, one.rank) for one in self._handles]

    def _tell(self, command: Command, numbers: Sequence[int] = ()) -> None:
        for handle in self._handles:
            commands.send(handle.commands, command, numbers)


def _end(
    failure: RankFailure,
    handles: list[RankHandle],
    folder: "TemporaryDirectory[str]",
    nodes: RemoteNodes | None,
) -> None:
    failed = failure.wait(0) is not None
    failure.expect_ends()
    if nodes is not None and not failed:
        nodes.stop()
    for handle in handles:
        with suppress(OSError):
            commands.send(handle.commands, Command.STOP)
    for handle in handles:
        handle.end(0.0 if failed else GRACE)
    if nodes is not None:
        nodes.close()
    folder.cleanup()
