"""The sets of adapters in a MemoryBackend, which behave like those in Redis."""

from collections.abc import Mapping, Sequence

from headrace_common.protocol.adapters import (
    AdapterReport,
    AdapterSet,
    decode_report,
    decode_set,
    encode_report,
    encode_set,
)

from .backend import MemoryBackend


class MemoryAdapterSets:
    """See AdapterSets. Reports do not expire."""

    def __init__(self, backend: MemoryBackend) -> None:
        self._backend = backend

    async def versions(self) -> Mapping[str, str]:
        self._backend.check()
        return {model: version for model, (version, _) in self._backend.adapter_sets.items()}

    async def version(self, model: str) -> str:
        return (await self.versions()).get(model, "")

    async def read(self, model: str) -> AdapterSet:
        self._backend.check()
        found = self._backend.adapter_sets.get(model)
        return AdapterSet() if found is None else decode_set(*found)

    async def replace(self, model: str, known: AdapterSet, new: AdapterSet) -> bool:
        data, version = encode_set(new), await self.version(model)
        if version == new.version:
            return True
        if version != known.version:
            return False
        self._backend.adapter_sets[model] = (new.version, data)
        return True

    async def report(self, model: str, engine_id: str, report: AdapterReport) -> None:
        self._backend.check()
        self._backend.adapter_reports[model, engine_id] = encode_report(report)

    async def reports(self, model: str, engine_ids: Sequence[str]) -> Mapping[str, AdapterReport]:
        self._backend.check()
        found = self._backend.adapter_reports
        return {
            name: decode_report(found[model, name]) for name in engine_ids if (model, name) in found
        }
