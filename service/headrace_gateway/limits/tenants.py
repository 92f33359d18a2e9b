"""The caller of a request, by whom models, priorities, prefix caches and metrics are separated.

A caller is known only if API keys are on; otherwise there are no tenants.
"""

import hashlib
from collections.abc import Callable, Iterable, MutableMapping, Set
from dataclasses import dataclass
from typing import Any, Protocol

from headrace_common.config.api_keys import DEFAULT_TENANT, ApiKey
from headrace_common.observability.metric_names import OTHER_TENANTS

from ..errors import ApiError

# The key of a request's state for its Caller, which the authentication sets.
CALLER = "headrace.caller"
# The key of a request's state for the id of the batch that sent it within this process.
BATCH = "headrace.batch"
MAX_LABELS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenancy:
    """The attributes that a request in the queue inherits from its caller."""

    priority: int
    cache_salt: bytes
    tenant: str = DEFAULT_TENANT
    tenant_weight: float = 1.0
    key: str = ""  # the id of its API key


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of an accepted key."""

    key: ApiKey

    @property
    def tenant(self) -> str:
        return self.key.tenant

    def priority(self, asked: int | None) -> int:
        """Returns the priority of a request that asked for `asked`.

        Raises ApiError if that is above the key's ceiling.
        """
        ceiling = self.key.priority_ceiling
        if asked is None:
            return max(0, ceiling)
        if asked < ceiling:
            raise ApiError(
                403,
                f"priority: {asked} is more urgent than this key allows. Send {ceiling} or more.",
                kind="permission_error",
                param="priority",
                code="priority_not_allowed",
            )
        return asked

    def tenancy(self, priority: int | None, cache_salt: str | None) -> Tenancy:
        """Returns the attributes for a request that asked for these values (None: did not ask).

        Raises ApiError.
        """
        return Tenancy(
            priority=self.priority(priority),
            cache_salt=tenant_salt(self.tenant, cache_salt),
            tenant=self.tenant,
            tenant_weight=self.key.tenant_weight,
            key=self.key.id,
        )


def any_model(_name: str) -> bool:
    """Allows every model."""
    return True


@dataclass(frozen=True, slots=True)
class ReadAccess:
    """The stored data that a caller may read: its tenant's, of models that its key allows."""

    tenant: str
    allows: Callable[[str], bool] = any_model

    def permits(self, tenant: str, models: Iterable[str]) -> bool:
        """Whether the caller may read what a tenant has stored of these models."""
        return tenant == self.tenant and all(map(self.allows, models))


class TenancyBody(Protocol):
    """A body that may ask for a priority and for a prefix cache of its own."""

    @property
    def priority(self) -> int: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def model_fields_set(self) -> Set[str]: ...


def tenancy_of(caller: Caller | None, body: TenancyBody) -> Tenancy:
    """Returns what a caller's request inherits; None if keys are off. Raises ApiError."""
    if caller is None:
        return Tenancy(priority=body.priority, cache_salt=(body.cache_salt or "").encode())
    asked = body.priority if "priority" in body.model_fields_set else None
    return caller.tenancy(asked, body.cache_salt)


def tenant_salt(tenant: str, asked: str | None) -> bytes:
    """Returns a salt that separates a tenant's prefix caches from others, and those of each salt.

    Its first byte is not in any UTF-8 text, so that no request without a tenant has the same salt.
    """
    digest = hashlib.sha256(f"{len(tenant)}:{tenant}:".encode())
    digest.update(b"" if asked is None else b"=" + asked.encode(errors="surrogatepass"))
    return b"\xff" + digest.digest()


def caller_of(state: MutableMapping[str, Any]) -> Caller | None:
    """Returns the Caller in a request's state; None if keys are off."""
    caller = state.get(CALLER)
    assert caller is None or isinstance(caller, Caller)
    return caller


def batch_of(state: MutableMapping[str, Any]) -> str | None:
    """Returns the id of the batch that sent the request; None for a client's own."""
    batch = state.get(BATCH)
    assert batch is None or isinstance(batch, str)
    return batch


class TenantLabels:
    """Tenants as labels of metrics: the first `most` by name, all further ones under one label.

    Tenants come from the keys' file, so there are few at a time; but over a process's life, with
    many changes of the file, there could be any number.
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
