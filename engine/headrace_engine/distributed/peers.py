"""The other ranks, as rank 0 leads them: it says what it is about to do, and they do the same.

Everything here is called by one thread at a time, that of the runner.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..config import EngineConfig
from ..errors import RankFailed
from ..kv_budget import Profile
from ..kv_groups import KVLayout
from ..lora.adapter import AdapterWeights
from ..lora.packing import by_layer, pack, ranks_of
from ..lora.shapes import LayerShapes
from ..model.base import ForwardBatch
from . import commands
from .commands import Gone, Pairs, Verb
from .fate import Fate, OnFailure
from .group import Group
from .process import Launcher, RankHandle, RankProcess

# Seconds for a rank to end by itself, and for a broken connection to be seen.
GRACE = 10.0
# Seconds for a rank whose connection is broken to be gone, on a machine that is very busy.
LONG_GRACE = 60.0
STORE = "meeting"
# Of rank 0 alone: scheduling, drafts and the files of adapters.
_OWN = ("speculative_config", "policy", "policy_options", "lora_modules")


class Peers:
    """Starts them; they load their parts meanwhile. They end with this object, or with `close`."""

    def __init__(self, config: EngineConfig, device: str, launch: Launcher = RankProcess) -> None:
        """`device` is a type of device: cpu or cuda."""
        size = config.tensor_parallel_size
        self.group = Group(0, size, device)
        self._device = device
        self._fate = Fate(self.group.abort)
        self._handles: list[RankHandle] = []
        self._folder = TemporaryDirectory(prefix="headrace-ranks-")
        self._end = weakref.finalize(self, _end, self._fate, self._handles, self._folder)
        greeting = {
            "config": _shared(config),
            "device": device,
            "store": str(self._store),
            "level": logging.getLogger().getEffectiveLevel(),
        }
        for rank in range(1, size):
            handle = launch(rank, size, self._fate.ended)
            self._handles.append(handle)
            with suppress(OSError):  # one that has ended is noticed when it is waited for
                commands.introduce(handle.commands, greeting)

    @property
    def handles(self) -> Sequence[RankHandle]:
        return tuple(self._handles)

    @property
    def _store(self) -> Path:
        return Path(self._folder.name) / STORE

    def connect(self) -> None:
        """Waits until all have loaded, then joins them into a group. Raises RankFailed."""
        with self.step():
            self._answers()
            self._tell(Verb.CONNECT)
            self.group.connect(self._store)
            self._answers()
        if self.group.met:
            self._folder.cleanup()

    def watch(self, on_failure: OnFailure) -> None:
        """Calls it, from any thread, when a rank fails, whether or not a step waits for it."""
        self._fate.watch(on_failure)

    def close(self) -> None:
        """Ends them. There are no more steps."""
        self._end()

    @contextmanager
    def step(self) -> Iterator[None]:
        """What all ranks do together. Broken off on this one, it is over with them all, as they
        would wait for what never comes. Raises RankFailed where another one broke off."""
        self._fate.check()
        try:
            yield
        except (OSError, RuntimeError, Gone) as error:
            failure = self._failure()
            self.close()
            if failure is not None or isinstance(error, Gone):
                raise RankFailed(str(failure or "a rank of the engine is gone")) from error
            raise
        except BaseException:
            self.close()
            raise

    def _failure(self) -> RankFailed | None:
        """Whether another rank has ended: its connection is the first thing to break."""
        if not wait([handle.commands for handle in self._handles], GRACE):
            return None
        return self._fate.wait(LONG_GRACE)

    def forward(self, batch: ForwardBatch, layout: KVLayout) -> None:
        runs = commands.adapter_runs(batch.lora)
        self._tell(Verb.FORWARD, (*commands.sizes_of(batch), *runs))
        self.group.broadcast(commands.pack(batch, layout))

    def record(self, max_model_len: int) -> None:
        self._tell(Verb.RECORD, (max_model_len,))

    def rehearse(self, max_model_len: int) -> None:
        self._tell(Verb.REHEARSE, (max_model_len,))

    def make_room(self, experts: bool) -> None:
        with self.step():
            self._tell(Verb.MAKE_ROOM, (int(experts),))

    def put_adapter(
        self, slot: int, shapes: Sequence[LayerShapes], weights: AdapterWeights
    ) -> None:
        """One decoder layer after the other, as an adapter may be larger than what is free."""
        ranks = ranks_of(shapes, weights)
        with self.step():
            self._tell(Verb.ADAPT, (slot, *ranks))
            for (layer, own), modules in zip(by_layer(shapes, ranks), weights, strict=True):
                if any(own):
                    self.group.broadcast(pack(layer, own, modules).to(self._device))

    def allocate(self, num_blocks: int) -> None:
        with self.step():
            self._tell(Verb.ALLOCATE, (num_blocks,))

    def reserve_host(self, num_blocks: int) -> None:
        with self.step():
            self._tell(Verb.RESERVE, (num_blocks,))

    def copy_blocks(self, copies: Pairs) -> None:
        with self.step():
            self._tell(Verb.COPY, tuple(commands.flat(copies)))

    def swap(self, swap_out: Pairs, swap_in: Pairs) -> None:
        with self.step():
            if swap_out:
                self._tell(Verb.SWAP_OUT, tuple(commands.flat(swap_out)))
            if swap_in:
                self._tell(Verb.SWAP_IN, tuple(commands.flat(swap_in)))

    def smallest(
        self,
        count: Callable[[Profile], int],
        profile: Profile,
        max_model_len: int,
    ) -> int:
        """The least that `count(profile)` gives on any rank, all profiling the same run."""

        def profile_all() -> int:
            later = profile()
            self._tell(Verb.MEASURED)
            return later

        with self.step():
            self._tell(Verb.MEASURE, (max_model_len,))
            own = count(profile_all)
            return min(own, *self._answers())

    def _answers(self) -> list[int]:
        return [commands.await_answer(one.commands, one.rank) for one in self._handles]

    def _tell(self, verb: Verb, numbers: tuple[int, ...] = ()) -> None:
        for handle in self._handles:
            commands.send(handle.commands, verb, numbers)


def _shared(config: EngineConfig) -> dict[str, Any]:
    names = (field.name for field in fields(config))
    return {name: getattr(config, name) for name in names if name not in _OWN}


def _end(fate: Fate, handles: list[RankHandle], folder: "TemporaryDirectory[str]") -> None:
    failed = fate.wait(0) is not None
    fate.expect()
    for handle in handles:
        with suppress(OSError):
            commands.send(handle.commands, Verb.STOP)
    for handle in handles:
        handle.end(0.0 if failed else GRACE)
    folder.cleanup()
