"""/v1/batches: many requests at the lowest priority, their results in files."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from headrace_common.protocol.batches import Batch

from ...batches.batch_service import CreateBatch
from ...batches.views import batch_body
from ...schemas.answers import BatchObject, BatchPage
from ..services import Services, services_of
from .documents import answer_of, body_of
from .pages import page

MAX_BATCHES_LISTED = 100

router = APIRouter()


@router.post("/v1/batches", openapi_extra=body_of(CreateBatch), **answer_of(BatchObject))
async def create_batch(request: Request) -> dict[str, Any]:
    """Begins to run the requests of a file."""
    services = services_of(request)
    body = await services.body(request, CreateBatch)
    key_id = "" if services.pipeline.caller is None else services.pipeline.caller.key.id
    return batch_body(await services.batches.create(services.read_access, key_id, body))


@router.get("/v1/batches", **answer_of(BatchPage))
async def list_batches(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_BATCHES_LISTED)] = 20,
    after: str | None = None,
) -> dict[str, Any]:
    """Returns the batches, newest first."""
    services = services_of(request)
    batches = await services.batches.all_batches(services.read_access)
    return page(batches, lambda batch: batch.request.id, batch_body, after=after, limit=limit)


@router.get("/v1/batches/{batch_id}", **answer_of(BatchObject))
async def retrieve_batch(batch_id: str, request: Request) -> dict[str, Any]:
    """Returns a batch with its progress."""
    return batch_body(await _find(batch_id, services_of(request)))


@router.post("/v1/batches/{batch_id}/cancel", **answer_of(BatchObject))
async def cancel_batch(batch_id: str, request: Request) -> dict[str, Any]:
    """Ends a batch; results that exist by then are kept."""
    services = services_of(request)
    return batch_body(await services.batches.cancel(await _find(batch_id, services)))


async def _find(batch_id: str, services: Services) -> Batch:
    return await services.batches.batch(batch_id, services.read_access)
