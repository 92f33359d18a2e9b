"""The gateway process: reads its settings, loads tokenizers, serves until SIGTERM."""

import gc

if __name__ == "__main__":
    from headrace_common.termination import exit_on_signal

    exit_on_signal()  # before imports that take a second
    gc.disable()  # modules stay: collecting garbage between them only takes time

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import uvloop

from headrace_common.config.process import (
    EXIT_CONFIG,
    EXIT_UNAVAILABLE,
    read_settings,
    run_until_signal,
)
from headrace_common.errors import HeadraceError, SettingsError
from headrace_common.observability import telemetry
from headrace_common.observability.clock_offset import show_clock_offset
from headrace_common.protocol.adapter_control import AdapterControl
from headrace_common.protocol.redis.accounts import RedisAccounts
from headrace_common.protocol.redis.adapters import RedisAdapterSets
from headrace_common.protocol.redis.client.connection import (
    Connection,
    ConnectionConfig,
    when_reachable,
)
from headrace_common.protocol.redis.gateway import RedisGatewayQueue
from headrace_common.protocol.redis.kv_events import RedisKVEventReader
from headrace_common.protocol.redis.limits import RedisKeyUsage
from headrace_common.protocol.redis.live import RedisLiveStore, RedisSharedRequests
from headrace_common.protocol.redis.loads import RedisModelLoads
from headrace_common.protocol.redis.memory import RedisMemory
from headrace_common.protocol.redis.refused import RedisRefusedGrammars
from headrace_common.protocol.redis.registry import RedisModelRegistry
from headrace_common.protocol.redis.store import RedisRequestStore
from headrace_common.protocol.redis.variants import RedisCanary
from headrace_common.protocol.registry import Files, RegisteredModel
from headrace_common.sealing.keyring_file import KeyringFile
from headrace_common.wire import keys

from .batches.assembly import open_storage
from .console.engine_supervisor import EngineSupervisor
from .http.app import AppDependencies, DurableStores, create_app
from .http.server import GatewayServer, listen, server_config
from .limits.allocator import give_back_memory
from .limits.api_keys import KeyFile
from .limits.work import prefer_event_loop
from .models.discovery import Discovery
from .models.loaded_adapters import LoadedAdapters
from .models.loading import load_registered, load_static
from .models.model_loads import counted
from .models.models import Models, ServedModel
from .queue_client.cached_prefixes import CachedPrefixes
from .queue_client.canary_comparisons import CanaryComparisons
from .queue_client.client import ClientConfig, GenerationClient
from .queue_client.engines import EngineDirectory
from .queue_client.prefix_routing import PrefixRouter
from .queue_client.request_history import RequestHistory
from .queue_client.withdrawal import withdraw_removed
from .settings import GatewaySettings
from .version import package_version

logger = logging.getLogger("headrace_gateway")

CLIENT_FAILED = "the queue's client has failed; the process must be restarted"
DISCOVERY_FAILED = "the discovery of models has failed; the process must be restarted"
# The part of its lease after which a gateway renews it: two renewals may be missed.
BEATS = 0.3
# Seconds beyond max_deadline for which an adapter that was removed is kept: other gateways may
# accept a request for it a little later.
KEPT_LONGER = 120.0


def main(arguments: list[str] | None = None) -> int:
    """Returns the process's exit code."""
    settings = read_settings(GatewaySettings, "headrace gateway", arguments)
    if settings is None:
        return EXIT_CONFIG
    give_back_memory()
    prefer_event_loop()
    try:
        static = load_static(settings)
        gc.collect()
        gc.freeze()
        with _listen(settings) as listener, asyncio.Runner(loop_factory=_loop) as runner:
            runner.run(run_until_signal(serve(settings, static, listener)))
    except HeadraceError as error:
        logger.error(
            "gateway cannot serve",
            extra={"code": error.code, "error": str(error)},
            exc_info=error.__cause__,
        )
        return EXIT_UNAVAILABLE if error.code == "backend_unavailable" else EXIT_CONFIG
    return 0


async def serve(
    settings: GatewaySettings, static: Mapping[str, ServedModel], listener: socket.socket
) -> None:
    """Serves on a listening socket until SIGTERM. Raises HeadraceError if it cannot start."""
    gateway_id = keys.new_incarnation(f"{socket.gethostname()}.{os.getpid()}")
    sealing = KeyringFile(settings)
    config = ConnectionConfig(url=settings.redis_url, credentials=settings.redis_credentials)
    connection = Connection(config, sealing.sealer)
    queue = RedisGatewayQueue(
        connection, gateway_id, lease_ms=round(settings.lease * 1000), ledger=settings.ledger
    )
    engines = EngineDirectory(queue)
    placer = _placer(settings, engines, connection)
    history = RequestHistory(connection.clock.now) if settings.console else None
    client = GenerationClient(
        queue,
        settings.queue_limits,
        connection.clock.now,
        config=ClientConfig(beat_interval=BEATS * settings.lease),
        placer=placer,
        shards=engines.shards,
        side=engines.side,
        turn=engines.time_to_turn,
        history=history,
    )
    comparisons = CanaryComparisons(client, engines, RedisCanary(connection), connection.clock.now)
    client.on_end(comparisons.ended)
    supervisor = _supervisor(settings)
    adapter_control = AdapterControl(
        RedisAdapterSets(connection),
        engines.engines,
        connection.clock.now,
        kept=settings.max_deadline + KEPT_LONGER,
    )
    discovery = _discovery(
        settings, static, connection, gateway_id, client, engines, adapter_control
    )
    served = Models(static, discovery, aliases=settings.model_aliases)
    api_keys = (
        None
        if settings.api_keys_file is None
        else KeyFile(
            settings.api_keys_file, lambda: datetime.fromtimestamp(connection.clock.now(), UTC)
        )
    )
    liveness = _liveness(client, discovery, api_keys, sealing)
    measures = telemetry.setup(
        "headrace-gateway",
        version=package_version(),
        instance_id=gateway_id,
        metrics_host=settings.metrics_host,
        metrics_port=settings.metrics_port,
        metrics_fd=settings.metrics_fd,
        live=liveness,
        ready=lambda: "starting",
    )
    show_clock_offset(measures, connection.clock)

    def ready() -> None:
        measures.set_health(live=liveness, ready=liveness)
        _announce(listener, served, gateway_id)

    try:
        sealing.start()
        if api_keys is not None:
            api_keys.start()
        await when_reachable(client.start, settings.startup_timeout)
        connection.watch(settings.redis_patience)
        await discovery.start()
        deps = AppDependencies(
            served=served,
            client=client,
            queue=queue,
            telemetry=measures,
            liveness=liveness,
            keys=api_keys,
            usage=None if api_keys is None else RedisKeyUsage(connection),
            durable=DurableStores(
                RedisRequestStore(connection),
                queue,
                RedisAccounts(connection),
                RedisMemory(connection).read,
            ),
            refused_grammars=RedisRefusedGrammars(connection),
            storage=open_storage(connection, gateway_id),
            supervisor=supervisor,
            history=history,
            shared_requests=RedisSharedRequests(connection, gateway_id),
            live=RedisLiveStore(connection, queue.send),
            adapter_control=adapter_control,
            clock=connection.clock,
            placed_tokens=None if placer is None else placer.tokens,
            comparisons=comparisons,
        )
        app = create_app(settings, deps)
        server = GatewayServer(
            server_config(app, settings),
            on_drain=lambda: app.state.services.pipeline.drain.begin(settings.drain_timeout),
            on_ready=ready,
        )
        await server.serve(sockets=[listener])
    finally:
        if supervisor is not None:
            supervisor.close()
        await sealing.close()
        if api_keys is not None:
            await api_keys.close()
        await discovery.close()
        await comparisons.close()
        await client.close()
        await connection.close()
        await asyncio.to_thread(measures.shutdown)


def _placer(
    settings: GatewaySettings, engines: EngineDirectory, connection: Connection
) -> PrefixRouter | None:
    if settings.placement == "none":
        return None
    return PrefixRouter(
        engines,
        CachedPrefixes(RedisKVEventReader(connection)),
        prefix_tokens=settings.placement_prefix_tokens,
        load_factor=settings.placement_load_factor,
        steal_after=settings.placement_steal_after,
    )


def _announce(listener: socket.socket, served: Models, gateway_id: str) -> None:
    logger.info(
        "gateway ready",
        extra={
            "address": _address(listener),
            "models": list(served.names),
            "gateway_id": gateway_id,
        },
    )


def _discovery(
    settings: GatewaySettings,
    static: Mapping[str, ServedModel],
    connection: Connection,
    gateway_id: str,
    client: GenerationClient,
    engines: EngineDirectory,
    adapter_control: AdapterControl,
) -> Discovery:
    loads = RedisModelLoads(connection, gateway_id)

    async def load(model: RegisteredModel, files: Files) -> ServedModel:
        async with counted(loads, model.digest):
            return await asyncio.to_thread(load_registered, model, files, settings.max_model_len)

    discovery = Discovery(
        RedisModelRegistry(connection),
        load,
        ignored=static,
        after_refresh=lambda: withdraw_removed(client, engines.engines, discovery.ended),
        loaded_adapters=LoadedAdapters(
            RedisAdapterSets(connection), adapter_control, connection.clock.now
        ),
    )
    return discovery


def _liveness(
    client: GenerationClient,
    discovery: Discovery,
    api_keys: KeyFile | None,
    sealing: KeyringFile,
) -> Callable[[], str | None]:
    def liveness() -> str | None:
        if client.failed is not None:
            return CLIENT_FAILED
        if discovery.failed is not None:
            return DISCOVERY_FAILED
        return sealing.failed or (None if api_keys is None else api_keys.failed)

    return liveness


def _listen(settings: GatewaySettings) -> socket.socket:
    try:
        return listen(settings)
    except OSError as error:
        if settings.fd is not None:
            raise SettingsError(f"fd: {settings.fd} is not a listening socket: {error}") from error
        raise SettingsError(
            f"port: cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
            "choose another with HEADRACE_GATEWAY_PORT"
        ) from error


def _supervisor(settings: GatewaySettings) -> EngineSupervisor | None:
    if settings.supervisor_fd is None:
        return None
    try:
        return EngineSupervisor.at(settings.supervisor_fd)
    except OSError as error:
        raise SettingsError(
            f"supervisor_fd: {settings.supervisor_fd} is not a socket: {error}"
        ) from error


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _loop() -> asyncio.AbstractEventLoop:
    return uvloop.new_event_loop()


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    sys.exit(main())
