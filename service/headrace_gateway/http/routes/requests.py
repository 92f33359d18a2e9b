"""/v1/requests/{id}: requests that outlive their connection, by the id in their events."""

from typing import Annotated

from fastapi import APIRouter, Header, Request, Response

from ...resumable.event_ids import START, parse_event_id, parse_position
from ...resumable.stored_requests import RequestSnapshot, request_content
from ...schemas.answers import RequestObject
from ...streaming.disconnecting_response import answering
from ..services import services_of
from .documents import answer_of

router = APIRouter()


@router.get("/v1/requests/{request_id}", **answer_of(RequestObject))
async def retrieve_request(request_id: str, request: Request) -> Response:
    """Returns a request's state; once it has completed, with its answer."""
    services = services_of(request)
    return _present(await services.resumable.snapshot(request_id, services.read_access))


@router.delete("/v1/requests/{request_id}", **answer_of(RequestObject))
async def cancel_request(request_id: str, request: Request) -> Response:
    """Ends a request, whether it waits or runs. One that has ended is not changed."""
    services = services_of(request)
    return _present(await services.resumable.cancel(request_id, services.read_access))


@router.get("/v1/requests/{request_id}/events")
async def stream_request(
    request_id: str,
    request: Request,
    last_event_id: Annotated[str | None, Header()] = None,
    starting_after: str | None = None,
) -> Response:
    """Streams a request's server-sent events after the last one received, or all of them."""
    services = services_of(request)
    had = START
    if last_event_id is not None:
        had = parse_event_id(last_event_id, request_id)
    elif starting_after is not None:
        had = parse_position(starting_after)
    response = await services.resumable.events(
        request_id, services.read_access, had, request.headers
    )
    return answering(request.scope["state"], response)


def _present(snapshot: RequestSnapshot) -> Response:
    return Response(request_content(snapshot), media_type="application/json")
