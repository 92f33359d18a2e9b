"""Who asks, and what that parts: models, priorities, prefix caches, metrics.

A caller is known only where API keys are on; without one everything is as if there were no tenants.
"""

import hashlib
from collections.abc import Callable, Iterable, MutableMapping, Set
from dataclasses import dataclass
from typing import Any, Protocol

from headrace_common.api_keys import DEFAULT_TENANT, ApiKey
from headrace_common.metric_names import OTHER_TENANTS

from .errors import ApiError

# Where in a request's state the authentication leaves its Caller.
CALLER = "headrace.caller"
# Where a batch that asks this process leaves its id.
BATCH = "headrace.batch"
MAX_LABELS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenancy:
    """What a request in the queue has of its caller."""

    priority: int
    cache_salt: bytes
    tenant: str = DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a key that was accepted."""

    key: ApiKey

    @property
    def tenant(self) -> str:
        return self.key.tenant

    def priority(self, asked: int | None) -> int:
        """The priority of a request that asked for this one. Raises ApiError over the ceiling."""
        ceiling = self.key.priority_ceiling
        if asked is None:
            return max(0, ceiling)
        if asked < ceiling:
            raise ApiError(
                403,
                f"priority: {asked} is more urgent than this key may ask for ({ceiling}).",
                kind="permission_error",
                param="priority",
                code="priority_not_allowed",
            )
        return asked

    def tenancy(self, priority: int | None, cache_salt: str | None) -> Tenancy:
        """What a request that asked for these gets; None: did not ask. Raises ApiError."""
        return Tenancy(
            priority=self.priority(priority),
            cache_salt=tenant_salt(self.tenant, cache_salt),
            tenant=self.tenant,
        )


def any_model(_name: str) -> bool:
    """Allows every model."""
    return True


@dataclass(frozen=True, slots=True)
class Reader:
    """Who asks for what is stored: for all else than its tenant's, of models that its key may use,
    it is as if there were nothing."""

    tenant: str
    allows: Callable[[str], bool] = any_model

    def may_read(self, tenant: str, models: Iterable[str]) -> bool:
        """Whether it may read what a tenant has stored of these models."""
        return tenant == self.tenant and all(map(self.allows, models))


class Asking(Protocol):
    """A body that may ask for a priority and for a prefix cache of its own."""

    @property
    def priority(self) -> int: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def model_fields_set(self) -> Set[str]: ...


def tenancy_of(caller: Caller | None, body: Asking) -> Tenancy:
    """What a caller's request gets, None: where keys are off. Raises ApiError."""
    if caller is None:
        return Tenancy(priority=body.priority, cache_salt=(body.cache_salt or "").encode())
    asked = body.priority if "priority" in body.model_fields_set else None
    return caller.tenancy(asked, body.cache_salt)


def tenant_salt(tenant: str, asked: str | None) -> bytes:
    """What parts a tenant's prefix caches from all others, and within it those of each salt.

    The first byte is in no UTF-8 text, so that no salt of a request without a tenant is the same.
    """
    digest = hashlib.sha256(f"{len(tenant)}:{tenant}:".encode())
    digest.update(b"" if asked is None else b"=" + asked.encode(errors="surrogatepass"))
    return b"\xff" + digest.digest()


def caller_of(state: MutableMapping[str, Any]) -> Caller | None:
    """Whom the authentication left in a request's state; None where keys are off."""
    caller = state.get(CALLER)
    assert caller is None or isinstance(caller, Caller)
    return caller


def batch_of(state: MutableMapping[str, Any]) -> str | None:
    """The id of the batch that asks; None where it is a client."""
    batch = state.get(BATCH)
    assert batch is None or isinstance(batch, str)
    return batch


class TenantLabels:
    """Tenants as labels of metrics: the first `most` by name, all further ones together.

    Tenants come from the keys' file, so there are few at a time; over a process's life, with many
    changes of the file, there could be any number.
    """

    def __init__(self, most: int = MAX_LABELS) -> None:
        self._most = most
        self._known: set[str] = set()

    def label(self, tenant: str) -> str:
        if tenant not in self._known:
            if len(self._known) >= self._most:
                return OTHER_TENANTS
            self._known.add(tenant)
        return tenant
