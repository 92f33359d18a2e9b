"""The console: its page at /, and /console/live with the data that it shows."""

from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Header, HTTPException, Query, Request, Response

from ...console.live_stream import LiveStream
from ...console.live_view import LiveView, Watcher, live_content
from ...console.page_files import INDEX
from ...errors import ApiError, invalid
from ...schemas.answers import ConsoleLimits, KilledEngine, RecentRequests
from ..services import Services, services_of
from .documents import answer_of

MAX_EVENTS = 1_000_000
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # the browser asks each time whether the page has changed
}

router = APIRouter()


@router.head("/", include_in_schema=False)
@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    return _file(request, INDEX)


@router.get("/console/live", response_class=Response)
async def live(
    request: Request, events: Annotated[int | None, Query(ge=1, le=MAX_EVENTS)] = None
) -> Response:
    """Streams what all models and engines do now, about four times a second.

    With `events` the stream ends after that many.
    """
    services = services_of(request)
    watcher = _watcher(services)

    def content(view: LiveView) -> dict[str, Any]:
        settings = services.settings
        found = live_content(
            view,
            watcher,
            limit_requests=settings.max_queued_requests,
            max_step_age=settings.max_step_age,
        )
        console = {
            "version": services.version,
            "kill": services.supervisor is not None,
            "keys": services.keys_on,
        }
        return {"console": console, **found}

    return LiveStream(
        services.live_feed,
        services.pipeline.tenant,
        content,
        events=events,
        write_timeout=services.settings.write_timeout,
        drain=services.pipeline.drain,
    )


@router.get("/console/requests", **answer_of(RecentRequests))
async def recent_requests(request: Request) -> dict[str, Any]:
    """Returns the caller's last requests and how they ended, the newest first."""
    services = services_of(request)
    found = await services.recent_requests.of(services.pipeline.tenant, services.models.allows)
    return {"time": services.pipeline.admission.clock(), "requests": found}


@router.get("/console/limits", **answer_of(ConsoleLimits))
async def limits(request: Request) -> dict[str, int]:
    """Returns what the chat may send."""
    settings = services_of(request).settings
    return {
        "images": settings.max_images,
        "image_bytes": settings.max_image_bytes,
        "image_pixels": settings.max_image_pixels,
        "body_bytes": settings.max_body_bytes,
    }


@router.post(
    "/console/engines/{engine_id}/kill",
    status_code=HTTPStatus.ACCEPTED,
    response_model=None,
    responses={HTTPStatus.ACCEPTED: {"model": KilledEngine}},
)
async def kill_engine(
    engine_id: str, request: Request, x_headrace_console: Annotated[str | None, Header()] = None
) -> dict[str, str]:
    """Kills an engine's process, where `headrace up` runs it and starts it again."""
    services = services_of(request)
    # Pages of other sites cannot send the header, unless CORS lets them.
    if x_headrace_console != "1" or not _same_site(request):
        raise invalid(
            "x-headrace-console: send this header with the value 1, from the console's own page.",
            param="x-headrace-console",
            code="console_header_missing",
        )
    killed = None
    if services.supervisor is not None and await _shown(services, engine_id):
        killed = await services.supervisor.kill(engine_id)
    if killed is None:
        raise ApiError(
            404,
            f"No engine {engine_id[:100]!r} that this server could kill runs here.",
            param="engine_id",
            code="engine_not_found",
        )
    return {"killed": killed}


@router.head("/console/{name}", include_in_schema=False)
@router.get("/console/{name}", include_in_schema=False)
async def page_file(name: str, request: Request) -> Response:
    return _file(request, name)


def _same_site(request: Request) -> bool:
    """Whether the request does not come from a page of another site."""
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")


async def _shown(services: Services, engine_id: str) -> bool:
    """Whether the id is that of an engine whose model the caller may use."""
    for model in services.models.queues:
        engines = await services.engines.engines(model)
        if any(engine.engine_id == engine_id for engine in engines):
            return True
    return False


def _watcher(services: Services) -> Watcher:
    tenant = services.pipeline.tenant if services.keys_on else None
    return Watcher(models=frozenset(services.models.queues), tenant=tenant)


def _file(request: Request, name: str) -> Response:
    found = services_of(request).page_files.get(name)
    if found is None:
        raise HTTPException(HTTPStatus.NOT_FOUND)
    headers = {**_HEADERS, "etag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)
