"""The gateway's application: collaborators in, ASGI out. Its lifespan starts everything."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from fastapi import FastAPI

from headrace_common.api_keys import DEFAULT_TENANT
from headrace_common.grammar_checks import CheckBounds, GrammarChecks
from headrace_common.grammar_settings import task_limits
from headrace_common.protocol.accounts import Accounts, Memory
from headrace_common.protocol.limits import KeyUsage
from headrace_common.protocol.redis_clock import RedisClock
from headrace_common.protocol.store import RequestStore
from headrace_common.refused_grammars import LocalRefusedGrammars, RefusedGrammars
from headrace_common.telemetry import Telemetry, disabled

from .admission import Admission, Limits
from .api_keys import KeyFile
from .authentication import OPEN_PATHS, Authentication
from .batches.assembly import Storage, make_desk, make_site
from .batches.desk import CreateBatch
from .batches.producer import BatchProducer
from .batches.readings import BatchReadings
from .body import BodyLimit
from .chat_output import ChatOutput
from .constraints import Constraints
from .cross_origin import add_cross_origin
from .drain import Drain
from .embeddings import EmbeddingRequest
from .engines import EngineDirectory
from .error_handlers import add_error_handlers
from .keeping import Keeping
from .kept import KeptRequests, Lifetimes
from .kept_embeddings import KeptEmbeddings
from .limits.work import WorkPool
from .messages_api.schemas import CountTokensRequest, MessagesRequest
from .metering import MeteredClient
from .metrics import Depths, GatewayMetrics, QueueReadings, StoreReadings
from .models import Models
from .observation import Observer
from .ports import Client, EngineList, Ledger, Line
from .rate_limits import RateLimits
from .responses_api.schemas import ResponsesRequest
from .routes import (
    batches,
    chat,
    completions,
    embeddings,
    files,
    health,
    messages,
    models,
    requests,
    responses,
    tokens,
)
from .routes.documents import document_bodies, document_errors, document_keys
from .schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .services import Services
from .sessions import Sessions
from .settings import GatewaySettings
from .tenant_stores import StoreLimits, TenantStores
from .version import package_version
from .watched import Delivery

# What a form has beside its file.
FORM_BYTES = 16_384


class Queue(EngineList, Depths, Line, Protocol):
    """What is read of the queue, for readiness, metrics and clients that wait."""


async def never_full() -> Memory:
    """The memory of a store without a limit."""
    return Memory(0, 0)


@dataclass(frozen=True, slots=True)
class Durable:
    """What knows of requests whichever gateway has them. `memory` reads that of the store."""

    store: RequestStore
    ledger: Ledger
    accounts: Accounts
    memory: Callable[[], Awaitable[Memory]] = never_full


def always_live() -> str | None:
    """The liveness of an application whose client cannot fail by itself."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The application's collaborators. `liveness` says what is broken beyond repair, if anything.

    The client and the keys are started, and closed, by the caller, on the event loop that serves.
    With `keys` every request needs one; `usage` counts what those with limits use. Without
    `durable` a request lives no longer than its connection, without `storage` there are no files
    and no batches. Requests' times are of `clock`.
    """

    served: Models
    client: Client
    queue: Queue
    telemetry: Telemetry = field(default_factory=disabled)
    liveness: Callable[[], str | None] = always_live
    keys: KeyFile | None = None
    usage: KeyUsage | None = None
    durable: Durable | None = None
    refused_grammars: RefusedGrammars = field(default_factory=LocalRefusedGrammars)
    storage: Storage | None = None
    clock: RedisClock = field(default_factory=RedisClock)


def create_app(settings: GatewaySettings, parts: Parts) -> FastAPI:
    """Wires the API."""
    metrics = GatewayMetrics(parts.telemetry.meter)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with ThreadPoolExecutor(settings.tokenizer_threads + 1, "work") as executor:
            stores = _stores(settings, parts)
            _observe(metrics, parts, stores)
            grammars = _grammars(settings, parts, metrics)
            services = _services(settings, parts, executor, metrics, grammars, stores)
            producer: BatchProducer | None = None
            if parts.storage is not None and stores is not None:
                site = make_site(
                    app, parts.storage, settings, services.keeping, stores, metrics, parts.keys
                )
                producer = BatchProducer(site, services.drain, running=settings.max_running_batches)
                desk = make_desk(parts.storage, settings, stores, producer.wake)
                services = replace(services, kept_files=desk)
                producer.start()
            app.state.services = services
            yield
            if producer is not None:
                await producer.close()
            services.drain.close()
            services.keeping.close()
            if services.rate_limits is not None:
                await services.rate_limits.close()
            await grammars.close()

    app = FastAPI(
        title="Headrace",
        version=package_version(),
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
    )
    for route in (
        batches,
        chat,
        completions,
        embeddings,
        files,
        responses,
        messages,
        requests,
        models,
        tokens,
        health,
    ):
        app.include_router(route.router)
    document_bodies(
        app,
        (
            ChatRequest,
            CompletionRequest,
            CreateBatch,
            EmbeddingRequest,
            ResponsesRequest,
            MessagesRequest,
            CountTokensRequest,
            TokenizeRequest,
            DetokenizeRequest,
        ),
    )
    document_errors(app)
    add_error_handlers(app)
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body_bytes,
        max_upload_bytes=settings.max_file_bytes + FORM_BYTES,
        timeout=settings.body_timeout,
    )
    if parts.keys is not None:
        document_keys(app, OPEN_PATHS)
        app.add_middleware(Authentication, find=parts.keys.find, refused=metrics.unauthorized)
    if settings.allowed_origins:  # outermost: browsers ask without a key, and read refusals
        add_cross_origin(app, settings.allowed_origins)
    return app


def _services(
    settings: GatewaySettings,
    parts: Parts,
    executor: ThreadPoolExecutor,
    metrics: GatewayMetrics,
    grammars: GrammarChecks,
    stores: TenantStores | None,
) -> Services:
    engines = EngineDirectory(parts.queue)
    limits = Limits(
        default_deadline=settings.default_deadline,
        max_deadline=settings.max_deadline,
        max_choices=settings.max_choices,
    )
    rate_limits = None if parts.usage is None else RateLimits(parts.usage, parts.clock.now)
    client = parts.client if rate_limits is None else MeteredClient(parts.client, rate_limits)
    observer = Observer(metrics, parts.telemetry.tracer)
    delivery = Delivery(
        keep_alive=settings.keep_alive_interval,
        write_timeout=settings.write_timeout,
        line=parts.queue,
    )
    drain = Drain()
    return Services(
        settings=settings,
        models=parts.served,
        work=WorkPool(executor, settings.tokenizer_threads).of(DEFAULT_TENANT),
        engines=engines,
        admission=Admission(client, engines, limits, parts.clock.now),
        observer=observer,
        delivery=delivery,
        drain=drain,
        keeping=Keeping(
            _kept(settings, parts, client, stores),
            embeddings=_kept_embeddings(parts, client, stores),
            models=parts.served,
            observer=observer,
            delivery=delivery,
            drain=drain,
        ),
        liveness=parts.liveness,
        notice=parts.clock.notice,
        version=package_version(),
        chat_output=ChatOutput(settings),
        constraints=Constraints(grammars),
        keys_on=parts.keys is not None,
        rate_limits=rate_limits,
    )


def _grammars(settings: GatewaySettings, parts: Parts, metrics: GatewayMetrics) -> GrammarChecks:
    limits = task_limits(settings)
    bounds = CheckBounds(workers=settings.grammar_workers, limits=limits)
    return GrammarChecks(bounds, parts.refused_grammars, metrics.grammar_checked)


def _stores(settings: GatewaySettings, parts: Parts) -> TenantStores | None:
    durable = parts.durable
    if durable is None:
        return None
    limits = StoreLimits(
        tenant_bytes=int(settings.max_tenant_store_bytes),
        requests=settings.max_stored_requests,
        embedding_bytes=int(settings.max_kept_embedding_bytes),
        file_bytes=int(settings.max_stored_bytes),
        files=settings.max_stored_files,
        memory_share=settings.store_memory_share,
    )
    return TenantStores(durable.accounts, limits, durable.memory, parts.clock.now)


def _kept(
    settings: GatewaySettings, parts: Parts, client: Client, stores: TenantStores | None
) -> KeptRequests | None:
    durable = parts.durable
    if durable is None or stores is None:
        return None
    sessions = Sessions(client, durable.store, stores.settle)
    lifetimes = Lifetimes(result=settings.result_ttl, window=settings.resume_window)
    return KeptRequests(durable.store, durable.ledger, sessions, lifetimes, stores, parts.clock.now)


def _kept_embeddings(
    parts: Parts, client: Client, stores: TenantStores | None
) -> KeptEmbeddings | None:
    durable = parts.durable
    if durable is None or stores is None:
        return None
    return KeptEmbeddings(durable.store, durable.ledger, client, stores, parts.clock.now)


def _observe(metrics: GatewayMetrics, parts: Parts, stores: TenantStores | None) -> None:
    if parts.telemetry.measuring:
        loop = asyncio.get_running_loop()
        metrics.observe_queue(QueueReadings(parts.queue, lambda: parts.served.queues, loop))
        if parts.storage is not None:
            metrics.observe_batches(BatchReadings(parts.storage.batches, loop, parts.clock.now))
        keys = parts.keys
        if keys is not None:
            metrics.observe_keys(keys)
        if stores is not None:
            tenants = None if keys is None else lambda: {key.tenant for key in keys.ring.keys}
            readings = StoreReadings(stores, tenants, loop)
            metrics.observe_stores(readings.current, stores.limits.tenant_bytes)
