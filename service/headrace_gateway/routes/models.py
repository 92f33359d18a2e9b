"""GET /v1/models and /v1/models/{id}: the same whether or not an engine runs right now."""

from typing import Any

from fastapi import APIRouter

from ..models import ServedModel
from ..services import Services, WithServices

router = APIRouter()


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models")
async def list_models(services: WithServices) -> dict[str, Any]:
    """All served models."""
    return {
        "object": "list",
        "data": [await _card(services, model) for model in services.models],
    }


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(model_id: str, services: WithServices) -> dict[str, Any]:
    """One served model."""
    return await _card(services, await services.models.find(model_id))


async def _card(services: Services, model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "headrace",
        "root": model.name,
        "parent": model.parent,
        "max_model_len": await services.admission.known_context(model),
    }
