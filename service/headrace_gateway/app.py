"""The gateway's application: collaborators in, ASGI out. Its lifespan starts everything."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from typing import Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from headrace_common.errors import HeadraceError
from headrace_common.sampling import SamplingError
from headrace_common.telemetry import Telemetry, disabled

from .admission import Admission, Limits
from .body import BodyLimit
from .drain import Drain
from .engines import EngineDirectory
from .errors import ApiError, to_api_error
from .metrics import Depths, GatewayMetrics, QueueReadings
from .models import Models
from .observation import Observer
from .ports import Client, EngineList
from .prompts import PromptEncoder
from .responding import Delivery
from .routes import chat, completions, health, models, tokens
from .routes.documents import document_bodies
from .schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .services import Services
from .settings import GatewaySettings


class Queue(EngineList, Depths, Protocol):
    """What is read of the queue, for readiness and metrics."""


def always_live() -> str | None:
    """The liveness of an application whose client cannot fail by itself."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The application's collaborators. `liveness` says what is broken beyond repair, if anything.

    The client is started, and closed, by the caller, on the event loop that serves.
    """

    served: Models
    client: Client
    queue: Queue
    telemetry: Telemetry = field(default_factory=disabled)
    liveness: Callable[[], str | None] = always_live


def create_app(settings: GatewaySettings, parts: Parts) -> FastAPI:
    """Wires the API."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with ThreadPoolExecutor(settings.tokenizer_threads, "tokenizer") as executor:
            services = _services(settings, parts, executor)
            app.state.services = services
            yield
            services.drain.close()

    app = FastAPI(
        title="Headrace",
        version=package_version(),
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
    )
    for route in (chat, completions, models, tokens, health):
        app.include_router(route.router)
    document_bodies(app, (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest))
    _add_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, timeout=settings.body_timeout)
    return app


def package_version() -> str:
    try:
        return distribution_version("headrace")
    except PackageNotFoundError:
        return "unknown"


def _services(settings: GatewaySettings, parts: Parts, executor: ThreadPoolExecutor) -> Services:
    engines = EngineDirectory(parts.queue)
    limits = Limits(
        default_deadline=settings.default_deadline,
        max_deadline=settings.max_deadline,
        max_choices=settings.max_choices,
    )
    return Services(
        settings=settings,
        models=parts.served,
        prompts=PromptEncoder(executor),
        engines=engines,
        admission=Admission(parts.client, engines, limits),
        observer=Observer(_metrics(parts), parts.telemetry.tracer),
        delivery=Delivery(
            keep_alive=settings.keep_alive_interval, write_timeout=settings.write_timeout
        ),
        drain=Drain(),
        liveness=parts.liveness,
        version=package_version(),
    )


def _metrics(parts: Parts) -> GatewayMetrics:
    metrics = GatewayMetrics(parts.telemetry.meter)
    if parts.telemetry.measuring:
        loop = asyncio.get_running_loop()
        metrics.observe_queue(QueueReadings(parts.queue, lambda: parts.served.names, loop))
    return metrics


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return _response(error)

    @app.exception_handler(HeadraceError)
    async def headrace_error(_: Request, error: HeadraceError) -> JSONResponse:
        return _response(to_api_error(error))

    @app.exception_handler(SamplingError)
    async def sampling_error(_: Request, error: SamplingError) -> JSONResponse:
        return _response(to_api_error(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return _response(_from_http(request, error))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        # Starlette logs the traceback after this answer is sent.
        return _response(
            ApiError(500, "Internal error.", kind="server_error", code="internal_error")
        )


def _response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, headers=error.headers)


def _from_http(request: Request, error: HTTPException) -> ApiError:
    message = str(error.detail)
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"Invalid URL ({request.method} {request.url.path[:200]})"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"Not allowed to {request.method} on {request.url.path[:200]}."
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return ApiError(error.status_code, message, code=code, headers=error.headers)
