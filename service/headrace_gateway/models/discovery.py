"""Follows the registry of models: loads what engines register, drops what is removed.

Loaded models stay served while Redis is unreachable. A model that cannot be loaded is logged and
tried again later; it does not delay the others.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace

from headrace_common.errors import BackendUnavailable, BackendUnfit, HeadraceError
from headrace_common.protocol.registry import Files, ModelRegistry, RegisteredModel

from ..errors import unavailable
from .loaded_adapters import LoadedAdapters
from .models import ServedModel

logger = logging.getLogger(__name__)

REFRESH_S = 2.0
# Least seconds between two readings of the registry because of names in requests. Clients can
# invent many names.
LOOKUP_S = 0.25
# Seconds after Redis has lost its data, until the engines have registered everything again.
LOST_S = 90.0
# Seconds between two attempts to load the same files.
RETRY_S = 30.0

Load = Callable[[RegisteredModel, Files], Awaitable[ServedModel]]


@dataclass(frozen=True, slots=True)
class _Loaded:
    entry: RegisteredModel
    served: ServedModel


class Discovery:
    """The registered models, except those in `ignored`. `load` makes a model from its files.

    `removed` are models that were served here and are no longer registered, until `forget` is
    called. `after_refresh` is awaited after each periodic reading of the registry.
    `loaded_adapters` are read with it.

    Use from one event loop. Times in seconds of `clock`.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        load: Load,
        *,
        ignored: Collection[str] = (),
        after_refresh: Callable[[], Awaitable[None]] | None = None,
        loaded_adapters: LoadedAdapters | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._registry = registry
        self._load = load
        self._ignored = frozenset(ignored)
        self._clock = clock
        self._sleep = sleep
        self._loaded: dict[str, _Loaded] = {}
        self._loads: dict[str, tuple[RegisteredModel, asyncio.Task[None]]] = {}
        self._failures: dict[str, tuple[RegisteredModel, float]] = {}
        # Loading many large tokenizers at once would need much memory.
        self._load_lock = asyncio.Lock()
        self._read_lock = asyncio.Lock()
        self._read_at = -LOOKUP_S
        self._registered: Collection[str] = ()
        self._store = ""
        self._after_refresh = after_refresh
        # models that were removed while their waiting requests stay in the queue
        self._holding: set[str] = set()
        self.removed: set[str] = set()
        self._lost_until = -math.inf
        self._trouble: HeadraceError | None = None
        self._task: asyncio.Task[None] | None = None
        self.served: Mapping[str, ServedModel] = {}
        self._loaded_adapters = loaded_adapters
        self._registered_adapters: Mapping[str, str] = {}
        # Adapters of all registered models, and those that engines have loaded while they served.
        # Ignored models are served too, so theirs are included.
        self.adapters: Mapping[str, str] = {}
        self.adapter_versions: Mapping[str, str] = {}

    @property
    def failed(self) -> BaseException | None:
        """The error that ended following the registry: a bug; the process must be restarted."""
        task = self._task
        if task is None or not task.done() or task.cancelled():
            return None
        return task.exception() or RuntimeError("the task of the discovery ended")

    async def start(self) -> None:
        """Loads what is registered now, as far as possible, and follows the registry from
        then on."""
        await self._refresh()
        if tasks := self._tasks():
            await asyncio.wait(tasks)
        self._task = asyncio.create_task(self._run(), name="discovery")
        self._task.add_done_callback(_log_failure)

    async def close(self) -> None:
        tasks = self._tasks()
        if self._task is not None:
            tasks.append(self._task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._sleep(REFRESH_S)
            await self._refresh()
            if self._after_refresh is not None:
                await self._after_refresh()

    def ended(self, model: str) -> bool:
        """Whether a model has ended, so that its waiting requests get an error."""
        known = (self._ignored, self._registered, self._loaded, self._holding)
        unclear = self._trouble is not None or self._clock() < self._lost_until
        return not unclear and not any(model in names for names in known)

    def forget(self, model: str) -> None:
        """Removes a model from `removed`, after all its data was deleted."""
        self.removed.discard(model)

    def _tasks(self) -> list["asyncio.Task[None]"]:
        return [task for _, task in self._loads.values()]

    async def ensure_loaded(self, name: str | None) -> None:
        """Reads the registry, at most four times a second, and waits until this model is loaded.

        An adapter's name loads its model. Raises BackendUnavailable if it is not known whether the
        model exists, and ApiError (503) if its files could not be loaded.
        """
        asked_at = self._clock()
        async with self._read_lock:
            if self._read_at < asked_at:  # a reading that began earlier may be older than the model
                if (early := self._read_at + LOOKUP_S - asked_at) > 0:
                    await self._sleep(early)
                await self._read()
        if self._trouble is not None:
            raise BackendUnavailable(str(self._trouble)) from self._trouble
        name = self._model_of(name)
        wanted = [task for key, (_, task) in self._loads.items() if name in (key, None)]
        if wanted:
            await asyncio.wait(wanted)
        if name in self._registered and name not in self.served:
            raise unavailable(
                f"The model {name!r} is registered, but cannot be loaded here now.",
                code="model_unavailable",
            )

    def _model_of(self, name: str | None) -> str | None:
        """Returns the model whose files are needed: for an adapter, its base model."""
        if name is None or name in self._registered:
            return name
        return self.adapters.get(name, name)

    async def _refresh(self) -> None:
        async with self._read_lock:
            await self._read()

    async def _read(self) -> None:
        self._read_at = self._clock()
        try:
            entries = await self._registry.models()
            if self._loaded_adapters is not None:
                await self._loaded_adapters.refresh()
        except (BackendUnavailable, BackendUnfit) as error:
            self._note(error)
        else:
            self._note(None)
            self._note_store(entries.store)
            self._note_adapters(entries)
            self._follow({n: e for n, e in entries.items() if n not in self._ignored})

    def _note(self, trouble: HeadraceError | None) -> None:
        """Logs a problem when it changes: the registry is read every few seconds."""
        if trouble is not None and self._trouble is None:
            extra = {"code": trouble.code, "error": str(trouble)}
            logger.warning(
                "registered models cannot be read, loaded models stay served", extra=extra
            )
        elif trouble is None and self._trouble is not None:
            logger.info("registered models can be read again")
        self._trouble = trouble

    def _note_store(self, store: str) -> None:
        if (self._loaded or self.adapters) and store != self._store:
            logger.warning(
                "redis lost the registered models, loaded models stay served for a while"
            )
            self._lost_until = self._clock() + LOST_S
        self._store = store

    def _note_adapters(self, entries: Mapping[str, RegisteredModel]) -> None:
        found = {name: entry.name for entry in entries.values() for name in entry.adapters}
        if self._clock() < self._lost_until:
            found = {**self._registered_adapters, **found}
        self._registered_adapters = found
        loaded = {} if self._loaded_adapters is None else self._loaded_adapters.by_name
        self.adapters = {**{name: each.model for name, each in loaded.items()}, **found}
        self.adapter_versions = {n: each.version for n, each in loaded.items() if n not in found}

    def _follow(self, entries: Mapping[str, RegisteredModel]) -> None:
        for name in self._loads.keys() - entries.keys():
            self._loads.pop(name)[1].cancel()
        for name in self._failures.keys() - entries.keys():
            del self._failures[name]
        if self._clock() >= self._lost_until:
            for name in self._loaded.keys() - entries.keys():
                self._remove(name, self._loaded.pop(name).entry)
        self._holding -= entries.keys()
        self.removed -= entries.keys()
        self._registered = entries.keys()
        for entry in entries.values():
            self._want(entry)
        self._publish()

    def _remove(self, name: str, entry: RegisteredModel) -> None:
        self.removed.add(name)
        if entry.holds:
            self._holding.add(name)
        logger.info("model removed", extra={"model": name})

    def _want(self, entry: RegisteredModel) -> None:
        """Serves this entry, at once or after loading its files."""
        known = self._loaded.get(entry.name)
        if known is not None and known.entry.digest == entry.digest:
            self._cancel_load(entry.name)
            if known.entry != entry:
                self._loaded[entry.name] = _Loaded(entry, _renewed(known.served, entry))
            return
        loading, _ = self._loads.get(entry.name, (None, None))
        if loading == entry or self._failed_lately(entry):
            return
        self._cancel_load(entry.name)
        task = asyncio.create_task(self._run_load(entry))
        self._loads[entry.name] = (entry, task)
        task.add_done_callback(lambda done: self._on_loaded(entry, done))

    def _cancel_load(self, name: str) -> None:
        if name in self._loads:
            self._loads.pop(name)[1].cancel()

    def _failed_lately(self, entry: RegisteredModel) -> bool:
        failed, at = self._failures.get(entry.name, (None, 0.0))
        return failed == entry and self._clock() - at < RETRY_S

    async def _run_load(self, entry: RegisteredModel) -> None:
        async with self._load_lock:
            twin = next(
                (each for each in self._loaded.values() if each.entry.digest == entry.digest), None
            )
            if twin is not None:
                served = _renewed(twin.served, entry)
            else:
                served = await self._load(entry, await self._registry.files(entry))
        self._loaded[entry.name] = _Loaded(entry, served)
        self._failures.pop(entry.name, None)
        self._publish()
        logger.info("model loaded", extra={"model": entry.name, "digest": entry.digest})

    def _on_loaded(self, entry: RegisteredModel, task: "asyncio.Task[None]") -> None:
        """Handles the end of a load. A failure must not affect other models."""
        if self._loads.get(entry.name, (None, None))[1] is task:
            del self._loads[entry.name]
        error = None if task.cancelled() else task.exception()
        if error is None or isinstance(error, BackendUnavailable):  # the next refresh tries again
            return
        self._failures[entry.name] = (entry, self._clock())
        logger.error(
            "a registered model cannot be loaded",
            extra={
                "model": entry.name,
                "code": getattr(error, "code", type(error).__name__),
                "error": str(error),
            },
            exc_info=None if isinstance(error, HeadraceError) else error,
        )

    def _publish(self) -> None:
        self.served = {name: self._loaded[name].served for name in sorted(self._loaded)}


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("the discovery of models failed", exc_info=task.exception())


def _renewed(served: ServedModel, entry: RegisteredModel) -> ServedModel:
    """Returns the loaded model under an entry that describes the same files differently."""
    return replace(
        served, name=entry.name, usual_model_len=entry.max_model_len, created=entry.created
    )
