"""POST /v1/embeddings."""

from fastapi import APIRouter, Request, Response

from ...generation.embedding_pipeline import embed
from ...generation.embeddings import EmbeddingRequest
from ...schemas.answers import EmbeddingList
from ..services import services_of
from .documents import answer_of, body_of

router = APIRouter()


@router.post("/v1/embeddings", openapi_extra=body_of(EmbeddingRequest), **answer_of(EmbeddingList))
async def create_embedding(request: Request) -> Response:
    """Returns one vector for each input (text or token ids), or one for messages."""
    services = services_of(request)
    body = await services.body(request, EmbeddingRequest)
    model = await services.models.find(body.model)
    max_inputs = services.settings.max_embedding_inputs
    return await embed(services.pipeline, request, body, model, max_inputs)
