"""The gateway's application: collaborators in, ASGI out. Its lifespan starts everything."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig

from headrace_common.config.api_keys import DEFAULT_TENANT
from headrace_common.observability.telemetry import Telemetry, disabled
from headrace_common.protocol.accounts import Accounts, StoreMemory
from headrace_common.protocol.adapter_control import AdapterControl
from headrace_common.protocol.limits import KeyUsage
from headrace_common.protocol.live import LiveStore
from headrace_common.protocol.redis.clock import RedisClock
from headrace_common.protocol.store import RequestStore
from headrace_common.structured.grammar_checks import CheckBounds, GrammarChecks
from headrace_common.structured.grammar_settings import task_limits
from headrace_common.structured.refused_grammars import LocalRefusedGrammars, RefusedGrammars

from ..anthropic.schemas import CountTokensRequest, MessagesRequest
from ..batches.assembly import Storage, make_batch_context, make_batch_service
from ..batches.batch_service import CreateBatch
from ..batches.leader import BatchLeader
from ..console.engine_supervisor import EngineSupervisor
from ..console.live_feed import LiveFeed, LiveSources
from ..console.page_files import PageFile, page_files, page_paths
from ..console.recent_requests import RecentRequests, SharedRequests
from ..generation.admission import Admission, Limits
from ..generation.constraints import Constraints
from ..generation.embeddings import EmbeddingRequest
from ..generation.metered_client import MeteredClient
from ..generation.pipeline import Pipeline
from ..generation.rendering import Rendering
from ..generation.resumable_response import ResumableRequests
from ..generation.scoring import RerankRequest, ScoreRequest
from ..images.fetching import Fetcher
from ..images.intake import ImageIntake, ImageLimits
from ..images.uploads import UploadedImages
from ..limits.api_keys import KeyFile
from ..limits.connections import most_connections, tenant_share
from ..limits.rate_limits import RateLimits
from ..limits.tenant_stores import StoreLimits, TenantStores
from ..limits.work import WorkPool
from ..models.models import Models
from ..openai.responses.schemas import ResponsesRequest
from ..parsing.chat_output import ChatOutput
from ..queue_client.canary_comparisons import CanaryComparisons
from ..queue_client.drain import Drain
from ..queue_client.engines import EngineDirectory
from ..queue_client.ports import Client, EngineList, QueuePositions, RequestDirectory
from ..queue_client.request_history import RequestHistory
from ..resumable.sessions import Sessions
from ..resumable.stored_embeddings import StoredEmbeddings
from ..resumable.stored_requests import Lifetimes, StoredRequests
from ..schemas.completions import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from ..settings import GatewaySettings
from ..streaming.disconnecting_response import Delivery
from ..streaming.keep_alive import KeepAlives
from ..telemetry.batch_scrape_cache import BatchScrapeCache
from ..telemetry.metrics import Depths, GatewayMetrics, QueueScrapeCache, StoreScrapeCache
from ..telemetry.observation import Observer
from ..version import package_version
from .authentication import OPEN_PATHS, Authentication
from .body import BodyLimit
from .cross_origin import add_cross_origin
from .deferred import SendDeferred
from .error_handlers import add_error_handlers
from .open_requests import OpenRequestLimit
from .routes import (
    adapters,
    batches,
    chat,
    completions,
    console,
    embeddings,
    files,
    health,
    messages,
    models,
    reference,
    requests,
    responses,
    scoring,
    tokens,
)
from .routes.documents import document_bodies, document_errors, document_headers, document_keys
from .services import Services

# Matched in this order: the most frequent routes come first.
ROUTES = (
    chat,
    completions,
    responses,
    messages,
    embeddings,
    scoring,
    batches,
    files,
    reference,
    requests,
    models,
    tokens,
    adapters,
    health,
)
# The framework's telemetry is not used: the gateway measures and traces requests itself, without
# any text of a request.
UNUSED_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
# Bytes of an upload's form in addition to its file.
FORM_BYTES = 16_384


class Queue(EngineList, Depths, QueuePositions, Protocol):
    """The parts of the queue that readiness, metrics and waiting clients read."""


async def never_full() -> StoreMemory:
    """Returns the memory of a store without a limit."""
    return StoreMemory(0, 0)


@dataclass(frozen=True, slots=True)
class DurableStores:
    """The stores in Redis, which all gateways share. `memory` reads how full Redis is."""

    store: RequestStore
    request_directory: RequestDirectory
    accounts: Accounts
    memory: Callable[[], Awaitable[StoreMemory]] = never_full


def always_live() -> str | None:
    """Returns the liveness of an application whose client cannot fail by itself."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AppDependencies:
    """The application's collaborators. `liveness` returns what is broken beyond repair, if
    anything.

    The caller starts and closes the client and the keys, on the event loop that serves. With `keys`
    every request needs one; `usage` counts what keys with limits use. Without `durable` a request
    lives no longer than its connection; without `storage` there are no files and no batches,
    without `live` consoles see engines' heartbeats only, and without `adapter_control` adapters do
    not change. `placed_tokens` are counted by model and kind, if requests are placed. `comparisons`
    compares canaries' answers. Requests' times are of `clock`.
    """

    served: Models
    client: Client
    queue: Queue
    telemetry: Telemetry = field(default_factory=disabled)
    liveness: Callable[[], str | None] = always_live
    keys: KeyFile | None = None
    usage: KeyUsage | None = None
    durable: DurableStores | None = None
    refused_grammars: RefusedGrammars = field(default_factory=LocalRefusedGrammars)
    storage: Storage | None = None
    live: LiveStore | None = None
    supervisor: EngineSupervisor | None = None
    history: RequestHistory | None = None
    shared_requests: SharedRequests | None = None
    adapter_control: AdapterControl | None = None
    placed_tokens: Mapping[tuple[str, str], int] | None = None
    comparisons: CanaryComparisons | None = None
    clock: RedisClock = field(default_factory=RedisClock)


def create_app(settings: GatewaySettings, deps: AppDependencies) -> FastAPI:
    """Returns the wired application."""
    metrics = GatewayMetrics(deps.telemetry.meter)
    page = page_files() if settings.console else {}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with ThreadPoolExecutor(_threads(settings), "work") as executor:
            stores = _stores(settings, deps)
            _observe(metrics, deps, stores)
            grammars = _grammars(settings, deps, metrics)
            rendering = Rendering()
            images = _images(settings, deps.storage, metrics)
            services = _services(
                settings, deps, executor, metrics, grammars, rendering, images, stores, page
            )
            leader: BatchLeader | None = None
            if deps.storage is not None and stores is not None:
                context = make_batch_context(
                    app, deps.storage, settings, services.resumable, stores, metrics, deps.keys
                )
                leader = BatchLeader(
                    context, services.pipeline.drain, running=settings.max_running_batches
                )
                batch_service = make_batch_service(
                    deps.storage, settings, images, stores, leader.wake
                )
                services = replace(services, batch_service=batch_service)
                leader.start()
            app.state.services = services
            if settings.console:
                services.recent_requests.start()
            yield
            await services.recent_requests.close()
            if leader is not None:
                await leader.close()
            services.pipeline.drain.close()
            services.resumable.close()
            if services.pipeline.rate_limits is not None:
                await services.pipeline.rate_limits.close()
            await grammars.close()
            await rendering.close()
            await images.close()

    modules = (*ROUTES, console) if settings.console else ROUTES
    app = FastAPI(
        title="Headrace",
        version=package_version(),
        lifespan=lifespan,
        # Included routers would look for each request's route twice.
        routes=[route for module in modules for route in module.router.routes],
        telemetry=UNUSED_TELEMETRY,
        redirect_slashes=False,
        openapi_url=None,  # would be made anew for each request
        docs_url=None,  # these pages load scripts from other sites
        redoc_url=None,
    )
    document_bodies(
        app,
        (
            ChatRequest,
            CompletionRequest,
            CreateBatch,
            EmbeddingRequest,
            ScoreRequest,
            RerankRequest,
            ResponsesRequest,
            MessagesRequest,
            CountTokensRequest,
            TokenizeRequest,
            DetokenizeRequest,
            adapters.LoadAdapterRequest,
            adapters.UnloadAdapterRequest,
        ),
    )
    document_errors(app)
    document_headers(app)
    add_error_handlers(app)
    app.add_middleware(SendDeferred)
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body_bytes,
        max_upload_bytes=settings.max_file_bytes + FORM_BYTES,
        timeout=settings.body_timeout,
    )
    if deps.keys is not None:
        connections = most_connections(settings.max_connections)
        app.add_middleware(
            OpenRequestLimit,
            most=min(settings.max_open_requests_per_tenant, tenant_share(connections)),
            refused=metrics.refused_open,
        )
        open_paths = OPEN_PATHS | (page_paths(page) if settings.console else frozenset())
        document_keys(app, open_paths)
        app.add_middleware(
            Authentication,
            find=deps.keys.find,
            refused=metrics.unauthorized,
            open_paths=open_paths,
        )
    if (
        settings.allowed_origins
    ):  # outermost: browsers send preflights without a key, and read refusals
        add_cross_origin(app, settings.allowed_origins)
    return app


def _services(
    settings: GatewaySettings,
    deps: AppDependencies,
    executor: ThreadPoolExecutor,
    metrics: GatewayMetrics,
    grammars: GrammarChecks,
    rendering: Rendering,
    images: ImageIntake,
    stores: TenantStores | None,
    page: Mapping[str, PageFile],
) -> Services:
    engines = EngineDirectory(deps.queue)
    limits = Limits(
        default_deadline=settings.default_deadline,
        max_deadline=settings.max_deadline,
        max_choices=settings.max_choices,
    )
    rate_limits = None if deps.usage is None else RateLimits(deps.usage, deps.clock.now)
    client = deps.client if rate_limits is None else MeteredClient(deps.client, rate_limits)
    observer = Observer(metrics, deps.telemetry.tracer)
    delivery = Delivery(
        write_timeout=settings.write_timeout,
        keep_alives=KeepAlives(settings.keep_alive_interval, deps.queue),
    )
    drain = Drain()
    pipeline = Pipeline(
        work=WorkPool(executor, _threads(settings)).of(DEFAULT_TENANT),
        admission=Admission(client, engines, limits, deps.clock.now),
        observer=observer,
        delivery=delivery,
        drain=drain,
        resumable=ResumableRequests(
            *_resumable(settings, deps, client, stores),
            models=deps.served,
            observer=observer,
            delivery=delivery,
            drain=drain,
        ),
        constraints=Constraints(grammars),
        rendering=rendering,
        images=images,
        rate_limits=rate_limits,
        history=deps.history,
    )
    return Services(
        settings=settings,
        models=deps.served,
        pipeline=pipeline,
        engines=engines,
        liveness=deps.liveness,
        notice=deps.clock.notice,
        version=package_version(),
        chat_output=ChatOutput(settings),
        page_files=page,
        live_feed=LiveFeed(
            LiveSources(
                models=deps.served,
                engines=engines,
                depths=deps.queue,
                store=deps.live,
                clock=deps.clock.now,
                history=deps.history,
            )
        ),
        recent_requests=RecentRequests(
            deps.history or RequestHistory(deps.clock.now), deps.shared_requests, deps.clock.now
        ),
        supervisor=deps.supervisor,
        keys_on=deps.keys is not None,
        adapter_control=deps.adapter_control,
    )


def _images(
    settings: GatewaySettings, storage: Storage | None, metrics: GatewayMetrics
) -> ImageIntake:
    return ImageIntake(
        ImageLimits(
            images=settings.max_images,
            image_bytes=int(settings.max_image_bytes),
            pixels=settings.max_image_pixels,
            held_bytes=int(settings.max_held_image_bytes),
            workers=settings.image_workers,
        ),
        Fetcher(settings.allowed_media_domains, int(settings.max_image_bytes)),
        UploadedImages(None if storage is None else storage.files),
        metrics.image_read,
    )


def _threads(settings: GatewaySettings) -> int:
    return settings.tokenizer_threads + 1  # one tenant may keep all but one of them busy


def _grammars(
    settings: GatewaySettings, deps: AppDependencies, metrics: GatewayMetrics
) -> GrammarChecks:
    limits = task_limits(settings)
    bounds = CheckBounds(workers=settings.grammar_workers, limits=limits)
    return GrammarChecks(bounds, deps.refused_grammars, metrics.grammar_checked)


def _stores(settings: GatewaySettings, deps: AppDependencies) -> TenantStores | None:
    durable = deps.durable
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
    return TenantStores(durable.accounts, limits, durable.memory, deps.clock.now)


def _resumable(
    settings: GatewaySettings, deps: AppDependencies, client: Client, stores: TenantStores | None
) -> tuple[StoredRequests | None, StoredEmbeddings | None]:
    durable, now = deps.durable, deps.clock.now
    if durable is None or stores is None:
        return None, None
    sessions = Sessions(client, durable.store, stores.settle)
    lifetimes = Lifetimes(result=settings.result_ttl, window=settings.resume_window)
    return (
        StoredRequests(durable.store, durable.request_directory, sessions, lifetimes, stores, now),
        StoredEmbeddings(durable.store, durable.request_directory, client, stores, now),
    )


def _observe(metrics: GatewayMetrics, deps: AppDependencies, stores: TenantStores | None) -> None:
    if deps.comparisons is not None:
        deps.comparisons.listen(metrics.compared)
    if deps.telemetry.measuring:
        loop = asyncio.get_running_loop()
        metrics.observe_queue(QueueScrapeCache(deps.queue, deps.served, loop))
        if deps.placed_tokens is not None:
            metrics.observe_placement(deps.placed_tokens)
        if deps.storage is not None:
            metrics.observe_batches(BatchScrapeCache(deps.storage.batches, loop, deps.clock.now))
        keys = deps.keys
        if keys is not None:
            metrics.observe_keys(keys)
        if stores is not None:
            tenants = None if keys is None else lambda: {key.tenant for key in keys.ring.keys}
            cache = StoreScrapeCache(stores, tenants, loop)
            metrics.observe_stores(cache.current, stores.limits.tenant_bytes)
