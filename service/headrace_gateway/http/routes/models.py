"""GET /v1/models and /v1/models/{id}: the same whether or not an engine runs right now.

OpenAI's and Anthropic's clients use the same paths; a header of the latter tells them apart.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from ...anthropic.errors import is_anthropics
from ...anthropic.models import listed, model_info, page_of
from ...models.models import ServedModel
from ...schemas.answers import AnthropicModel, AnthropicModelList, Model, ModelList
from ..services import Services, services_of
from .documents import answer_of

MAX_LISTED = 1000

router = APIRouter()


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", **answer_of(ModelList | AnthropicModelList))
async def list_models(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
    after_id: str | None = None,
    before_id: str | None = None,
) -> dict[str, Any]:
    """Returns all served models; with `anthropic-version` a page of them in Anthropic's form."""
    services = services_of(request)
    models = await services.models.listed()
    if is_anthropics(request.scope):
        page, more = page_of(models, limit=limit, after=after_id, before=before_id)
        return listed([await _info(services, model) for model in page], has_more=more)
    return {"object": "list", "data": [await _card(services, model) for model in models]}


@router.get("/v1/models/{model_id:path}", **answer_of(Model | AnthropicModel))
async def retrieve_model(model_id: str, request: Request) -> dict[str, Any]:
    """Returns one served model."""
    services = services_of(request)
    model = (await services.models.find(model_id)).known_as(model_id)
    return await (_info if is_anthropics(request.scope) else _card)(services, model)


async def _info(services: Services, model: ServedModel) -> dict[str, Any]:
    return model_info(model, await services.admission.known_context(model))


async def _card(services: Services, model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "headrace",
        "root": model.own_name,
        "parent": model.parent,
        "max_model_len": await services.admission.known_context(model),
        "architecture": {"input_modalities": _modalities(model)},
    }


def _modalities(model: ServedModel) -> list[str]:
    if model.images is None:
        return ["text"]
    return ["text", "image"] if model.images.video is None else ["text", "image", "video"]
