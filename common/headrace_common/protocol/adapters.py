"""The adapters that a model's engines load while they serve: their set, and what engines report.

The set is in Redis and changes as a whole. An engine reads it once a second, loads what is new and
reports what it has. An adapter is served from the first report on. One that is removed or replaced
stays loaded until the requests that were accepted before have ended.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Protocol

import msgpack

from ..errors import HeadraceError
from ..wire.messages import MAX_ID_CHARS, adapter_key

MOST_SERVED = 128  # adapters of one model that are loading or ready
MAX_SET_BYTES = 2**20
MAX_REPORT_BYTES = 2**18
MAX_PATH_CHARS = 4096
MAX_REASON_CHARS = 1000

_NOTHING: Mapping[str, str] = MappingProxyType({})


class AdapterError(HeadraceError):
    """A set of adapters cannot be changed like this; the message says why and what to do."""

    code = "adapter_refused"


class AdapterState(StrEnum):
    LOADING = "loading"  # no engine has reported yet that it has it
    READY = "ready"
    RETIRED = "retired"  # removed or replaced; requests that were accepted before may still run


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One version of an adapter of a model.

    `path` is a folder that engines can read. `by` says who asked for it. `digest` is that of its
    files, as the first engine that loaded it has found; "" before. Engines with other files refuse
    it. A retired adapter is kept until `until`. Times are Unix seconds of Redis.
    """

    adapter_id: str
    name: str
    path: str
    by: str
    created: float
    state: AdapterState = AdapterState.LOADING
    digest: str = ""
    until: float = 0.0

    @property
    def key(self) -> str:
        """The key under which engines have it; as GenerateRequest.adapter."""
        return adapter_key(self.name, self.digest)


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """The adapters of a model, the oldest first. `version` is random; "": there never was one."""

    version: str = ""
    adapters: tuple[Adapter, ...] = ()

    def ready(self) -> dict[str, Adapter]:
        """The adapters that are served, by name."""
        return {each.name: each for each in self.adapters if each.state is AdapterState.READY}

    @property
    def loading(self) -> tuple[Adapter, ...]:
        return tuple(each for each in self.adapters if each.state is AdapterState.LOADING)

    def serves_or_loads(self, name: str, path: str) -> bool:
        """Whether an adapter of this name is served from a folder, or being loaded."""
        return any(
            (each.name, each.path) == (name, path) and each.state is not AdapterState.RETIRED
            for each in self.adapters
        )

    def find(self, adapter_id: str) -> Adapter | None:
        return next((each for each in self.adapters if each.adapter_id == adapter_id), None)

    def added(self, adapter: Adapter) -> "AdapterSet":
        """With an adapter to load. Raises AdapterError."""
        if not 0 < len(adapter.name) <= MAX_ID_CHARS or not adapter.name.isprintable():
            raise AdapterError(f"lora_name: must have 1 to {MAX_ID_CHARS} printable characters")
        if not 0 < len(adapter.path) <= MAX_PATH_CHARS or not adapter.path.isprintable():
            raise AdapterError(f"lora_path: must have 1 to {MAX_PATH_CHARS} printable characters")
        served = [each for each in self.adapters if each.state is not AdapterState.RETIRED]
        if len(served) >= MOST_SERVED:
            raise AdapterError(
                f"the model has {len(served)} adapters, and may have {MOST_SERVED}: unload one"
            )
        return self._with((*self.adapters, adapter))

    def confirmed(self, adapter_id: str, digest: str, until: float) -> "AdapterSet":
        """With an adapter that an engine has loaded: earlier versions of it are retired."""
        adapter = self.find(adapter_id)
        if adapter is None or adapter.state is not AdapterState.LOADING:
            return self
        kept: list[Adapter] = []
        for each in self.adapters:
            if each is adapter:
                kept.append(replace(each, state=AdapterState.READY, digest=digest))
            elif each.name != adapter.name or each.state is AdapterState.RETIRED:
                kept.append(each)
            elif each.state is AdapterState.READY:
                kept.append(replace(each, state=AdapterState.RETIRED, until=until))
            elif each.created > adapter.created:
                kept.append(each)
        return self._with(tuple(kept))

    def withdrawn(self, adapter_id: str) -> "AdapterSet":
        """Without an adapter that is not ready."""
        adapter = self.find(adapter_id)
        if adapter is None or adapter.state is not AdapterState.LOADING:
            return self
        return self._with(tuple(each for each in self.adapters if each is not adapter))

    def retired(self, name: str, until: float) -> "AdapterSet":
        """With all versions of an adapter removed or retired."""
        kept = tuple(
            replace(each, state=AdapterState.RETIRED, until=until)
            if each.name == name and each.state is AdapterState.READY
            else each
            for each in self.adapters
            if each.name != name or each.state is not AdapterState.LOADING
        )
        return self if kept == self.adapters else self._with(kept)

    def without_expired(self, now: float) -> "AdapterSet":
        """Without retired adapters that no request can use any more."""
        kept = tuple(
            each
            for each in self.adapters
            if each.state is not AdapterState.RETIRED or each.until > now
        )
        return self if len(kept) == len(self.adapters) else self._with(kept)

    @staticmethod
    def _with(adapters: tuple[Adapter, ...]) -> "AdapterSet":
        return AdapterSet(secrets.token_hex(8), adapters)


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What an engine that takes work has loaded: digests of files by adapter id, and the reasons
    why it has refused others."""

    loaded: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    refused: Mapping[str, str] = field(default_factory=lambda: _NOTHING)


class AdapterSets(Protocol):
    """The sets of adapters of all models. Raises BackendUnavailable."""

    async def versions(self) -> Mapping[str, str]:
        """The versions of all models' sets, in one cheap read."""

    async def version(self, model: str) -> str:
        """The version of one model's set; "" if there is none."""

    async def read(self, model: str) -> AdapterSet:
        """A model's set. Raises AdapterError if it is unreadable."""

    async def replace(self, model: str, known: AdapterSet, new: AdapterSet) -> bool:
        """Replaces a set; False if it is not `known` any more."""

    async def report(self, model: str, engine_id: str, report: AdapterReport) -> None:
        """Publishes an engine's report for one lease."""

    async def reports(self, model: str, engine_ids: Sequence[str]) -> Mapping[str, AdapterReport]:
        """The reports of these engines, as far as there are any."""


def new_adapter(name: str, path: str, by: str, now: float) -> Adapter:
    """An adapter to load."""
    return Adapter(adapter_id=secrets.token_hex(8), name=name, path=path, by=by, created=now)


def encode_set(adapters: AdapterSet) -> bytes:
    """Packs the adapters of a set. Raises AdapterError if there are too many."""
    entries = [
        [a.adapter_id, a.name, a.path, a.by, a.created, a.state.value, a.digest, a.until]
        for a in adapters.adapters
    ]
    data: bytes = msgpack.packb(entries)
    if len(data) > MAX_SET_BYTES:
        raise AdapterError(
            f"{len(entries)} adapters, with those that were removed lately, are too many: wait"
        )
    return data


_KINDS: tuple[type | tuple[type, ...], ...] = (
    *(str, str, str, str),
    *((int, float), str, str),
    (int, float),
)


def decode_set(version: str, data: bytes) -> AdapterSet:
    """Unpacks and checks a set; further elements of an entry are ignored. Raises AdapterError."""
    return AdapterSet(version, tuple(map(_adapter, _unpacked(data, MAX_SET_BYTES, list))))


def _adapter(entry: object) -> Adapter:
    if not isinstance(entry, list) or len(entry) < len(_KINDS):
        raise AdapterError("set of adapters: an entry is not a list of its fields")
    values = entry[: len(_KINDS)]
    if not all(isinstance(value, kind) for value, kind in zip(values, _KINDS, strict=True)):
        raise AdapterError("set of adapters: a field is of another type")
    adapter_id, name, path, by, created, state, digest, until = values
    if state not in tuple(AdapterState):
        raise AdapterError(f"set of adapters: unknown state {state[:40]!r}")
    return Adapter(
        adapter_id=adapter_id,
        name=name,
        path=path,
        by=by,
        created=created,
        state=AdapterState(state),
        digest=digest,
        until=until,
    )


def encode_report(report: AdapterReport) -> bytes:
    """Packs a report; reasons are shortened."""
    refused = {name: reason[:MAX_REASON_CHARS] for name, reason in report.refused.items()}
    data: bytes = msgpack.packb([dict(report.loaded), refused])
    return data


def decode_report(data: bytes) -> AdapterReport:
    """Unpacks and checks a report. Raises AdapterError."""
    parts = _unpacked(data, MAX_REPORT_BYTES, list)
    if len(parts) < 2 or not all(map(_are_names, parts[:2])):
        raise AdapterError("report of adapters: must be two maps of strings")
    return AdapterReport(*parts[:2])


def _are_names(part: object) -> bool:
    return isinstance(part, dict) and all(
        isinstance(text, str) for item in part.items() for text in item
    )


def _unpacked(data: bytes, limit: int, kind: type) -> Any:
    if len(data) > limit:
        raise AdapterError(f"set of adapters: {len(data)} bytes are over {limit}")
    try:
        body = msgpack.unpackb(data, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise AdapterError(f"set of adapters: not msgpack: {error}") from error
    if not isinstance(body, kind):
        raise AdapterError(f"set of adapters: must be a {kind.__name__}")
    return body


def digest_reported(adapter_id: str, reports: Iterable[AdapterReport]) -> str | None:
    """The digest of an adapter that some engine has loaded; None if none has."""
    return next((each.loaded[adapter_id] for each in reports if adapter_id in each.loaded), None)
