"""What the queue's registry of models says of a ModelService: known, unknown, or another's name.

Reads only; a Redis that does not answer leaves it open, and reconciliation goes on without it.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.registry import ModelRegistry

from . import names
from .cluster import Cluster
from .errors import NotFound
from .spec import ModelService

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Registration:
    """`registered`: this ModelService's engines have told of the model; None where it is not known.

    `rival` is who has registered the served name instead, in words for people.
    """

    registered: bool | None
    rival: str | None = None


class Registrations:
    """`namespace` is the one that the operator watches; None: every one."""

    def __init__(self, cluster: Cluster, registry: ModelRegistry, namespace: str | None) -> None:
        self._cluster = cluster
        self._registry = registry
        self._namespace = namespace

    async def of(self, service: ModelService) -> Registration:
        """Raises ClusterError where the API server does not answer."""
        try:
            entry = (await self._registry.models()).get(service.served_name)
        except BackendUnavailable as error:
            logger.warning(
                "registry of models not read",
                extra={"model_service": service.name, "error": str(error)},
            )
            return Registration(None)
        if entry is None:
            return Registration(False)
        if entry.owner == service.owner:
            return Registration(True)
        if await self._is_left_over(entry.owner, entry.name):
            return Registration(False)
        return Registration(False, rival=_in_words(entry.owner))

    async def _is_left_over(self, owner: str, model: str) -> bool:
        """Whether nobody claims the name any more; the entry is then about to be removed."""
        namespace, _, name = owner.partition("/")
        if not name or not watched(owner, self._namespace):
            return False
        try:
            body = await self._cluster.get(names.API_VERSION, names.KIND, namespace, name)
        except NotFound:
            return True
        return claimed_name(body) != model


def watched(owner: str, namespace: str | None) -> bool:
    """Whether the operator of `namespace`, or of all where it is None, sees this owner."""
    where, slash, _ = owner.partition("/")
    return bool(slash) and namespace in (None, where)


def claimed_name(body: Mapping[str, Any]) -> str:
    """The served name of a raw ModelService, which need not be valid."""
    model = (body.get("spec") or {}).get("model") or {}
    return str(model.get("servedName") or body["metadata"]["name"])


def _in_words(owner: str) -> str:
    return f"ModelService {owner}" if owner else "an engine that no ModelService owns"
