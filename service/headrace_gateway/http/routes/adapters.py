"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM, for a model's engines."""

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import Field, StrictBool

from headrace_common.protocol.adapter_control import AdapterControl
from headrace_common.protocol.adapters import MAX_PATH_CHARS, AdapterError, new_adapter

from ...errors import ApiError, invalid
from ...limits.fields import Name
from ...limits.tenants import caller_of
from ...models.models import ServedModel
from ...schemas.chat_messages import Body
from ..services import Services, services_of
from .documents import body_of

router = APIRouter()


class LoadAdapterRequest(Body):
    """vLLM's body. `base_model_name` may be left out if one model is served."""

    lora_name: Name
    lora_path: str = Field(min_length=1, max_length=MAX_PATH_CHARS)
    load_inplace: StrictBool = False
    base_model_name: Name | None = None


class UnloadAdapterRequest(Body):
    """vLLM's body. `lora_int_id` has no meaning here."""

    lora_name: Name
    lora_int_id: int | None = None


@router.post(
    "/v1/load_lora_adapter",
    openapi_extra=body_of(LoadAdapterRequest),
    response_class=PlainTextResponse,
)
async def load_lora_adapter(request: Request) -> PlainTextResponse:
    """Has all engines of a model load an adapter; answers once the first one has it."""
    services, control, by = _allowed(request)
    body = await services.body(request, LoadAdapterRequest)
    model = await services.models.find(body.base_model_name)
    if model.parent is not None:
        raise invalid(f"{model.name!r} is an adapter: name its model", param="base_model_name")
    served = _served(services, body.lora_name)
    if served is not None and (served.lora_version is None or served.queue != model.queue):
        raise invalid(f"The name {body.lora_name!r} is taken: choose another.", param="lora_name")
    adapter = new_adapter(body.lora_name, body.lora_path, by, services.admission.clock())
    patience = services.settings.lora_load_timeout
    try:
        await control.load(model.queue, adapter, replaces=body.load_inplace, patience=patience)
    except AdapterError as error:
        raise invalid(str(error), param="lora_path", code="adapter_refused") from error
    await services.models.refresh()
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(
    "/v1/unload_lora_adapter",
    openapi_extra=body_of(UnloadAdapterRequest),
    response_class=PlainTextResponse,
)
async def unload_lora_adapter(request: Request) -> PlainTextResponse:
    """Serves an adapter no longer; requests that were accepted before still end."""
    services, control, _ = _allowed(request)
    body = await services.body(request, UnloadAdapterRequest)
    await services.models.refresh()
    served = _served(services, body.lora_name)
    if served is None or served.parent is None:
        raise ApiError(
            404,
            f"The lora adapter {body.lora_name!r} cannot be found.",
            param="lora_name",
            code="adapter_not_found",
        )
    if served.lora_version is None:
        raise invalid(
            f"{body.lora_name!r} is named in the engines' lora_modules: remove it there.",
            param="lora_name",
        )
    try:
        await control.unload(served.queue, body.lora_name)
    except AdapterError as error:
        raise ApiError(404, str(error), param="lora_name", code="adapter_not_found") from error
    await services.models.refresh()
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _allowed(request: Request) -> tuple[Services, AdapterControl, str]:
    """Returns the services, and who asks. Raises ApiError for a caller who may not."""
    services, caller = services_of(request), caller_of(request.scope["state"])
    if services.adapter_control is None or not services.settings.allow_runtime_lora_updating:
        raise _forbidden("This server's adapters do not change (allow_runtime_lora_updating).")
    if services.keys_on and (caller is None or not caller.key.admin):
        raise _forbidden("Only API keys with admin may change adapters.")
    return services, services.adapter_control, "" if caller is None else caller.key.id


def _served(services: Services, name: str) -> ServedModel | None:
    return next((model for model in services.models if model.name == name), None)


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code="not_allowed")
