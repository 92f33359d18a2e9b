"""POST /v1/score and /v1/rerank."""

from fastapi import APIRouter, Request, Response

from ...generation.scoring import RerankRequest, ScoreRequest, score
from ...schemas.answers import Ranking, ScoreList
from ..services import services_of
from .documents import answer_of, body_of

router = APIRouter()


@router.post("/score", openapi_extra=body_of(ScoreRequest), **answer_of(ScoreList))
@router.post("/v1/score", openapi_extra=body_of(ScoreRequest), **answer_of(ScoreList))
async def create_score(request: Request) -> Response:
    """Returns the similarity of each pair of texts."""
    return await _scored(request, ScoreRequest)


@router.post("/rerank", openapi_extra=body_of(RerankRequest), **answer_of(Ranking))
@router.post("/v1/rerank", openapi_extra=body_of(RerankRequest), **answer_of(Ranking))
@router.post("/v2/rerank", openapi_extra=body_of(RerankRequest), **answer_of(Ranking))
async def create_rerank(request: Request) -> Response:
    """Returns documents in the order in which they answer a query."""
    return await _scored(request, RerankRequest)


async def _scored(request: Request, kind: type[ScoreRequest] | type[RerankRequest]) -> Response:
    services = services_of(request)
    body: ScoreRequest | RerankRequest = await services.body(request, kind)
    model = await services.models.find(body.model)
    most = services.settings.max_embedding_inputs
    return await score(services.pipeline, request, body, model, most)
