"""/v1/requests/{id}: requests that outlive their connection, by the id in their events."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response

from ..event_ids import START, parse_event_id, parse_position
from ..kept import request_body
from ..services import WithServices

router = APIRouter()


@router.get("/v1/requests/{request_id}")
async def retrieve_request(request_id: str, services: WithServices) -> dict[str, Any]:
    """Where a request is; once it has completed, with its answer."""
    return request_body(await services.keeping.view(request_id, services.tenant))


@router.delete("/v1/requests/{request_id}")
async def cancel_request(request_id: str, services: WithServices) -> dict[str, Any]:
    """Ends a request, wherever it waits or runs; one that has ended stays as it is."""
    return request_body(await services.keeping.cancel(request_id, services.tenant))


@router.get("/v1/requests/{request_id}/events")
async def stream_request(
    request_id: str,
    request: Request,
    services: WithServices,
    last_event_id: Annotated[str | None, Header()] = None,
    starting_after: str | None = None,
) -> Response:
    """A request's stream of server-sent events behind the last one received, or all of it."""
    had = START
    if last_event_id is not None:
        had = parse_event_id(last_event_id, request_id)
    elif starting_after is not None:
        had = parse_position(starting_after)
    headers = dict(request.headers)
    return await services.keeping.events(request_id, services.tenant, had, headers)
