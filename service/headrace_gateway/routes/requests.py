"""/v1/requests/{id}: requests that outlive their connection, by the id in their events."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response

from ..event_ids import START, parse_event_id, parse_position
from ..kept import View, request_content
from ..services import WithServices

router = APIRouter()


@router.get("/v1/requests/{request_id}", response_model=dict[str, Any])
async def retrieve_request(request_id: str, services: WithServices) -> Response:
    """Where a request is; once it has completed, with its answer."""
    return _present(await services.keeping.view(request_id, services.reader))


@router.delete("/v1/requests/{request_id}", response_model=dict[str, Any])
async def cancel_request(request_id: str, services: WithServices) -> Response:
    """Ends a request, wherever it waits or runs; one that has ended stays as it is."""
    return _present(await services.keeping.cancel(request_id, services.reader))


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
    return await services.keeping.events(request_id, services.reader, had, headers)


def _present(view: View) -> Response:
    return Response(request_content(view), media_type="application/json")
