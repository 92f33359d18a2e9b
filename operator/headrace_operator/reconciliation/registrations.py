"""Reads from the registry whether a ModelService's model is known, or its name taken by another.

Reads only; without an answer from Redis the state is unknown, and reconciliation continues.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.registry import ModelRegistry

from .. import names
from ..cluster.cluster import Cluster
from ..errors import NotFound
from ..spec.model_service import ModelService

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RegistrationStatus:
    """Whether this ModelService's engines have `registered` the model; None if unknown.

    `rival` is the other owner of the served name, in words for people. `unreachable` is why Redis
    could not be asked.
    """

    registered: bool | None
    rival: str | None = None
    unreachable: str | None = None


class Registrations:
    """Looks up ModelServices. `namespace` is the one that the operator watches; None: all."""

    def __init__(self, cluster: Cluster, registry: ModelRegistry, namespace: str | None) -> None:
        self._cluster = cluster
        self._registry = registry
        self._namespace = namespace

    async def of(self, service: ModelService) -> RegistrationStatus:
        """The registration of a ModelService. Raises ClusterError if the API server fails."""
        try:
            entry = (await self._registry.models()).get(service.served_name)
        except BackendUnavailable as error:
            logger.warning(
                "registry of models cannot be read",
                extra={"model_service": service.name, "error": str(error)},
            )
            return RegistrationStatus(None, unreachable=str(error))
        if entry is None:
            return RegistrationStatus(False)
        if entry.owner == service.owner:
            return RegistrationStatus(True)
        if await self._is_left_over(entry.owner, entry.name):
            return RegistrationStatus(False)
        return RegistrationStatus(False, rival=_in_words(entry.owner))

    async def _is_left_over(self, owner: str, model: str) -> bool:
        """Whether no ModelService claims the name any more; the entry will then be removed."""
        namespace, _, name = owner.partition("/")
        if not name or not watched(owner, self._namespace):
            return False
        try:
            body = await self._cluster.get(names.API_VERSION, names.KIND, namespace, name)
        except NotFound:
            return True
        return claimed_name(body) != model


def watched(owner: str, namespace: str | None) -> bool:
    """Whether the operator of `namespace` (None: of all) watches this owner."""
    where, slash, _ = owner.partition("/")
    return bool(slash) and namespace in (None, where)


def claimed_name(body: Mapping[str, Any]) -> str:
    """The served name of a raw ModelService, which may be invalid."""
    model = (body.get("spec") or {}).get("model") or {}
    return str(model.get("servedName") or body["metadata"]["name"])


def _in_words(owner: str) -> str:
    return f"ModelService {owner}" if owner else "an engine that no ModelService owns"
