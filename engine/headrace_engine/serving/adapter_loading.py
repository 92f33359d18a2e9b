"""Loads and removes adapters while the engine serves, as the model's set of adapters says.

Files are read in a thread; the adapter is installed between two steps. The queue hands out requests
for an adapter only after that, and as long as the engine has it.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from headrace_common.errors import BackendUnavailable, BackendUnfit
from headrace_common.protocol.adapters import (
    Adapter,
    AdapterError,
    AdapterReport,
    AdapterSet,
    AdapterSets,
    AdapterState,
)
from headrace_common.protocol.base import EngineQueue
from headrace_common.wire.messages import adapter_key

from ..core.errors import EngineError
from ..engine.engine_loop import EngineLoop
from ..kv_cache.memory_budget import available_memory
from ..lora.adapters import LoadedAdapter
from ..lora.object_storage import is_in_object_storage

logger = logging.getLogger(__name__)

CHECK_S = 1.0
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
# Seconds until an adapter that was refused is tried again: a volume may show new files late.
RETRY_S = 30.0


class AdapterRunner(Protocol):
    """The part of a ModelRunner that has adapters."""

    def read_adapter(self, folder: Path) -> LoadedAdapter: ...

    def install_adapter(self, name: str, adapter: LoadedAdapter) -> None: ...

    def remove_adapter(self, name: str) -> None: ...


class AdapterLoading:
    """Keeps one engine's adapters as the model's set says. Runs on the event loop.

    Only folders inside of `root` are loaded and, with `fetch`, hub ids. With `fetched`, s3://
    addresses are too: it takes an address and the most bytes, and makes a folder for one block.
    `available` returns the free bytes of host memory.
    """

    def __init__(
        self,
        sets: AdapterSets,
        runner: AdapterRunner,
        model: str,
        root: Path,
        *,
        fetch: Callable[[str], Path] | None = None,
        fetched: Callable[[str, int], AbstractContextManager[Path]] | None = None,
        available: Callable[[], int] = available_memory,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sets = sets
        self._runner = runner
        self._model = model
        self._root = root
        self._fetch = fetch
        self._fetched = fetched
        self._available = available
        self._sleep = sleep
        self._clock = clock
        self._set = AdapterSet()
        self._digests: dict[str, str] = {}  # of loaded adapters by id
        self._refused: dict[str, tuple[str, float]] = {}  # reason, and when
        self._installed: set[str] = set()
        self._served: set[str] = set()

    async def start(
        self, queue: EngineQueue, loop: EngineLoop, draining: Callable[[], bool]
    ) -> None:
        """Loads the adapters that are served now, before the engine takes work."""
        self._queue, self._loop, self._draining = queue, loop, draining
        try:
            await self._follow(retired=False)
        except (BackendUnavailable, BackendUnfit) as error:
            logger.warning("no adapters loaded before the start", extra={"error": str(error)})

    async def keep(self, in_use: Callable[[], Collection[str]]) -> None:
        """Follows the set.

        `in_use` returns the adapters of the requests that the engine has.
        """
        while True:
            await self._sleep(CHECK_S)
            await self.turn(in_use())

    async def keep_reported(self) -> None:
        """Reports what is loaded, also while an adapter is fetched, which may take minutes."""
        while True:
            await self.report()
            await self._sleep(CHECK_S)

    async def turn(self, in_use: Collection[str]) -> None:
        """Loads and removes what has changed."""
        try:
            await self._follow(retired=True)
            await self._remove_unused(in_use)
        except (BackendUnavailable, BackendUnfit) as error:
            logger.warning("set of adapters not read, they stay", extra={"error": str(error)})

    async def report(self) -> None:
        """Tells gateways and the operator what this engine has loaded, if there is anything to
        tell and it does not drain."""
        if not self._set.adapters or self._draining():
            return
        refused = {name: reason for name, (reason, _) in self._refused.items()}
        report = AdapterReport(dict(self._digests), refused)
        try:
            await self._sets.report(self._model, self._queue.engine_id, report)
        except (BackendUnavailable, BackendUnfit) as error:
            logger.warning("adapters not reported", extra={"error": str(error)})

    async def _follow(self, *, retired: bool) -> None:
        version = await self._sets.version(self._model)
        if version != self._set.version:
            await self._read(version)
        for adapter in self._set.adapters:
            if retired or adapter.state is not AdapterState.RETIRED:
                await self._want(adapter)
        self._serve()

    async def _read(self, version: str) -> None:
        if not version:
            await self._restore()
            return
        try:
            self._set = await self._sets.read(self._model)
        except AdapterError as error:
            logger.warning("set of adapters unreadable, kept", extra={"error": str(error)})
            return
        known = {adapter.adapter_id for adapter in self._set.adapters}
        self._digests = {name: self._digests[name] for name in self._digests.keys() & known}
        self._refused = {name: self._refused[name] for name in self._refused.keys() & known}

    async def _restore(self) -> None:
        """Writes the set again if Redis has lost it. An engine may be forbidden to."""
        try:
            await self._sets.replace(self._model, AdapterSet(), self._set)
        except BackendUnfit:
            logger.warning("redis lost the set of adapters, those that are loaded stay")

    async def _want(self, adapter: Adapter) -> None:
        """Loads an adapter unless that was done, or failed lately."""
        if adapter.adapter_id in self._digests:
            if adapter.digest in ("", self._digests[adapter.adapter_id]):
                return
            del self._digests[adapter.adapter_id]  # the first engine that loaded it had other files
        _, refused_at = self._refused.get(adapter.adapter_id, ("", -RETRY_S))
        if self._clock() - refused_at < RETRY_S:
            return
        try:
            digest = await self._load(adapter)
        except (AdapterError, EngineError, OSError) as error:
            extra = {"adapter": adapter.name, "error": str(error)}
            logger.warning("adapter refused", extra=extra)
            self._refused[adapter.adapter_id] = (str(error), self._clock())
        else:
            self._refused.pop(adapter.adapter_id, None)
            self._digests[adapter.adapter_id] = digest
            self._serve()
            await self.report()

    async def _load(self, adapter: Adapter) -> str:
        """Returns the digest of an adapter that is loaded now.

        Raises AdapterError, EngineError, OSError.
        """
        if adapter.digest and adapter.key in self._installed:
            return adapter.digest
        found = await self._found(adapter.path)
        if adapter.digest and found.digest != adapter.digest:
            raise AdapterError(
                f"{adapter.path}: its files are not those that the first engine loaded: put a new "
                "version into a new folder"
            )
        key = adapter_key(adapter.name, found.digest)
        if key not in self._installed:
            await self._between_steps(lambda: self._runner.install_adapter(key, found))
            self._installed.add(key)
        return found.digest

    async def _found(self, path: str) -> LoadedAdapter:
        """An adapter's files, read. Raises AdapterError, EngineError, OSError."""
        if is_in_object_storage(path):
            return await asyncio.to_thread(self._read_fetched, path)
        folder = await self._folder(path)
        self._check_memory(folder)
        return await asyncio.to_thread(self._runner.read_adapter, folder)

    def _read_fetched(self, path: str) -> LoadedAdapter:
        if self._fetched is None:
            raise AdapterError(
                f"{path}: engines load no adapters from object storage: set lora_object_storage"
            )
        with self._fetched(path, self._available()) as folder:
            return self._runner.read_adapter(folder)

    async def _folder(self, path: str) -> Path:
        """The folder of an adapter, fetched if it is a hub id.

        Raises AdapterError if it is not inside of the root, CheckpointError.
        """
        folder = (self._root / path).resolve()
        if not folder.is_relative_to(self._root.resolve()):
            raise AdapterError(f"{path}: adapters are loaded from the engines' lora_dir only")
        if self._fetch is not None and _HUB_ID.fullmatch(path) and not folder.is_dir():
            return await asyncio.to_thread(self._fetch, path)
        return folder

    def _check_memory(self, folder: Path) -> None:
        """Raises AdapterError if an adapter does not fit the free memory."""
        needed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        free = self._available()
        if needed > free:
            raise AdapterError(f"{folder}: has {needed} bytes, but only {free} are free")

    def _serve(self) -> None:
        """Tells the queue which adapters this engine has."""
        wanted = {
            adapter_key(adapter.name, self._digests[adapter.adapter_id])
            for adapter in self._set.adapters
            if adapter.adapter_id in self._digests
        }
        if wanted != self._served:
            self._served = wanted
            self._queue.serve_adapters(sorted(wanted))

    async def _remove_unused(self, in_use: Collection[str]) -> None:
        """Removes adapters that the set has no longer and no request uses.

        No request for them comes any more: they were kept until all had ended.
        """
        for key in self._installed - self._served - {*in_use}:
            await self._between_steps(lambda key=key: self._runner.remove_adapter(key))  # type: ignore[misc]
            self._installed.discard(key)

    async def _between_steps(self, action: Callable[[], None]) -> None:
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def act() -> None:
            action()
            loop.call_soon_threadsafe(done.set)

        self._loop.between_steps(act)
        await done.wait()
