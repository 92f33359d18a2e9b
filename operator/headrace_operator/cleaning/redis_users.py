"""Keeps a Redis user, a Secret with its password and a grant for each ModelService.

So its engines can touch only their model's keys. Redis replicates no users, so each replica gets
them too and has them when it becomes master. Level-triggered: checks all ModelServices at
intervals, and soon after one has changed. Reads no Secret: passwords are derived from a key and an
annotation; a change of the annotation makes a new password. The new one is valid immediately, the
old one until all pods have the new one.
"""

import base64
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence, Set
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import unquote

from redis.exceptions import ResponseError

from headrace_common.errors import BackendUnavailable, BackendUnfit
from headrace_common.protocol.redis.client.connection import Connection
from headrace_common.protocol.redis.users import ENGINE, USER, model_rules, model_user
from headrace_common.protocol.registry import ModelRegistry, RegistrationGrant

from .. import names
from ..cluster.cluster import Cluster
from ..cluster.drain import EngineControl
from ..desired.metadata import metadata
from ..errors import ClusterError, InvalidSpec, NotFound
from ..spec.model_service import ModelService
from .periodic_task import PeriodicTask

logger = logging.getLogger(__name__)
Manifest = dict[str, Any]

ROTATED = 600.0  # seconds until the files of every pod have followed their Secret
PREFIX = model_user("")
assert PREFIX == f"{USER}{ENGINE}.", "names of models' users begin alike"


class RedisUsers(PeriodicTask):
    """Manages the users. `admin` is a connection of a user that may create others.

    Passwords are derived from `key`. `namespace` is the watched one (None: all). `clock` is
    monotonic.
    """

    def __init__(
        self,
        cluster: Cluster,
        admin: Connection,
        key: bytes,
        registry: ModelRegistry,
        directory: EngineControl,
        namespace: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._cluster = cluster
        self._admin = admin
        self._key = key
        self._registry = registry
        self._directory = directory
        self._namespace = namespace
        self._clock = clock
        self._since: dict[tuple[str, str], float] = {}  # when a user's password was first seen
        self._rules: dict[tuple[str, str], Sequence[str]] = {}  # by run of a server, and user

    async def run_once(self) -> None:
        """Checks once. If Redis or the API server does not answer, the next check does its work."""
        try:
            await self._run_once()
        except (BackendUnavailable, BackendUnfit, ClusterError) as error:
            logger.warning("redis users not updated, tried again", extra={"error": str(error)})

    async def _run_once(self) -> None:
        claims = await self._claims()
        async with self._servers() as servers:
            for claim in claims:
                await self._keep_alone(servers, *claim)
            wanted = {model_user(service.served_name) for service, _ in claims}
            await self._remove_all_but(servers, wanted)
            for server in servers:
                await server.save()
        runs = {server.run for server in servers}
        self._rules = {key: rules for key, rules in self._rules.items() if key[0] in runs}

    @asynccontextmanager
    async def _servers(self) -> AsyncIterator[list["ServerUsers"]]:
        """The master, and the replicas that answer."""
        replicas = await self._admin.replicas()
        try:
            servers = [await ServerUsers.of(self._admin)]
            for replica in replicas:
                try:
                    servers.append(await ServerUsers.of(replica))
                except BackendUnavailable as error:
                    fields = {"at": replica.config.server, "error": str(error)}
                    logger.warning("redis users not updated on a replica", extra=fields)
            yield servers
        finally:
            for replica in replicas:
                await replica.close()

    async def _claims(self) -> list[tuple[ModelService, str]]:
        """The ModelServices with engines in this Redis, each with its annotation.

        If several have one served name, only the oldest: only its engines serve that model.
        """
        found = await self._cluster.list(names.API_VERSION, names.KIND, self._namespace, {})
        oldest_first = sorted(found, key=lambda body: body["metadata"].get("creationTimestamp", ""))
        claims: dict[str, tuple[ModelService, str]] = {}
        for body in oldest_first:
            with suppress(InvalidSpec):  # its own status says that
                service = ModelService.parse(body)
                annotations = body["metadata"].get("annotations") or {}
                claim = service, str(annotations.get(names.REDIS_PASSWORD, ""))
                if service.spec.queue.url_secret is None:
                    claims.setdefault(service.served_name, claim)
        return list(claims.values())

    async def _keep_alone(
        self, servers: Sequence["ServerUsers"], service: ModelService, annotation: str
    ) -> None:
        """Keeps one user; a Secret that cannot be written must not affect other ModelServices."""
        try:
            await self._keep(servers, service, annotation)
        except ClusterError as error:
            fields = {"model_service": service.name, "error": str(error)}
            logger.warning("redis user not updated, tried again", extra=fields)

    async def _keep(
        self, servers: Sequence["ServerUsers"], service: ModelService, annotation: str
    ) -> None:
        """Creates or changes a user on each server where it differs."""
        model = service.served_name
        user, rules = model_user(model), model_rules(model, service.sharing_group)
        password = self._password(service, annotation)
        digest = hashlib.sha256(password.encode()).hexdigest()
        known = [await server.passwords(user) for server in servers]
        since = self._since.setdefault((user, digest), self._clock())
        former = set().union(*known) if self._clock() - since < ROTATED else set()
        wanted = {digest, *former}
        for server, found in zip(servers, known, strict=True):
            if found != wanted or self._rules.get((server.run, user)) != rules:
                await server.set(user, wanted, rules)
                self._rules[server.run, user] = rules
        await self._write(secret(service, user, password))  # only once Redis knows the password
        adapters = () if service.spec.lora is None else service.spec.lora.adapters
        granted = RegistrationGrant(
            owner=service.owner, adapters=tuple(each.name for each in adapters)
        )
        await self._registry.grant(model, granted)

    def _password(self, service: ModelService, annotation: str) -> str:
        text = f"{service.uid}\n{service.owner}\n{service.served_name}\n{annotation}"
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()

    async def _write(self, manifest: Manifest) -> None:
        """Writes a Secret without the right to patch Secrets, which would allow reading any."""
        try:
            await self._cluster.replace(manifest)
        except NotFound:
            await self._cluster.create(manifest)

    async def _remove_all_but(self, servers: Sequence["ServerUsers"], wanted: set[str]) -> None:
        """Removes all other users. A user stays while its engines run, so that they can finish."""
        found = [await server.models() for server in servers]
        for user in set().union(*found) - wanted:
            model = unquote(user.removeprefix(PREFIX))
            if not await self._directory.engines(model):
                await self._registry.revoke(model)
                for server in servers:
                    await server.remove(user)
        self._since = {key: at for key, at in self._since.items() if key[0] in wanted}


class ServerUsers:
    """The users of one server; `run` identifies the server since its start."""

    def __init__(self, connection: Connection, run: str) -> None:
        self._connection = connection
        self.run = run
        self._changed = False

    @classmethod
    async def of(cls, connection: Connection) -> "ServerUsers":
        """Raises BackendUnavailable."""
        info = await connection.attempt(lambda: connection.client.command("INFO", "server"))
        return cls(connection, info["run_id"])

    async def passwords(self, user: str) -> set[str]:
        """Hashes of a user's passwords; none if there is no such user."""
        found = await self._acl("GETUSER", user)
        return set() if found is None else {_text(each).lstrip("#") for each in found["passwords"]}

    async def models(self) -> set[str]:
        """Names of the users of models."""
        return {user for user in map(_text, await self._acl("USERS")) if user.startswith(PREFIX)}

    async def set(self, user: str, hashes: Set[str], rules: Sequence[str]) -> None:
        """Creates a user, or replaces its passwords and rules."""
        words = [f"#{each}" for each in sorted(hashes)]
        await self._acl("SETUSER", user, "reset", "on", *words, *rules)
        self._changed = True

    async def remove(self, user: str) -> None:
        await self._acl("DELUSER", user)
        self._changed = True

    async def save(self) -> None:
        """Saves changes for a restart of the server, if it has an ACL file."""
        if not self._changed:
            return
        try:
            await self._acl("SAVE")
        except ResponseError as error:
            logger.debug("redis users not saved: no ACL file", extra={"error": str(error)})

    async def _acl(self, *words: str) -> Any:
        command, *rest = words
        return await self._connection.attempt(
            lambda: self._connection.client.command(f"ACL {command}", *rest), tries=2
        )


def secret(service: ModelService, user: str, password: str) -> Manifest:
    """The Secret that an engine's pod mounts."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(service, names.redis_secret(service.name)),
        "type": "kubernetes.io/basic-auth",
        "data": {
            "username": base64.b64encode(user.encode()).decode(),
            "password": base64.b64encode(password.encode()).decode(),
        },
    }


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
