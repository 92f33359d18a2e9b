"""GET /health/live, /health/ready, /version; /health is vLLM's name of the first.

Live means that this process answers. Ready means that an engine of any model, or of the given one,
works or is idle; a model that is scaled to zero must not make the others unreachable.
"""

from collections.abc import Sequence

from fastapi import APIRouter, Request

from headrace_common.errors import BackendUnavailable

from ...errors import ApiError, unavailable
from ...schemas.answers import Health, Version
from ..services import Services, services_of
from .documents import answer_of

router = APIRouter()

# With API keys on, clients without a key learn no model names here.
ANONYMOUS = "Not ready."


@router.head("/health", include_in_schema=False)
@router.get("/health", **answer_of(Health))
@router.head("/health/live", include_in_schema=False)
@router.get("/health/live", **answer_of(Health))
async def live(request: Request) -> dict[str, str]:
    """Whether this process can continue; says nothing about the engines."""
    broken = services_of(request).liveness()
    if broken is not None:
        raise unavailable(f"Not live: {broken}.", code="not_live")
    return {"status": "ok"}


@router.head("/health/ready", include_in_schema=False)
@router.get("/health/ready", **answer_of(Health))
async def ready(request: Request, model: str | None = None) -> dict[str, str]:
    """Whether a request for `model`, or for any model, would be served now.

    Answers 503 with the reason if not, or 404 for an unknown model. A fault that stops nothing is a
    warning.
    """
    services = services_of(request)
    names = services.models.queues if model is None else (await _named(services, model),)
    reason = await _unready(services, names)
    if reason is not None:
        shown = ANONYMOUS if services.keys_on else f"Not ready: {reason}."
        raise unavailable(shown, code="not_ready")
    notice = None if services.keys_on else services.notice()
    return {"status": "ok"} if notice is None else {"status": "ok", "warning": notice}


@router.head("/version", include_in_schema=False)
@router.get("/version", **answer_of(Version))
async def version(request: Request) -> dict[str, str]:
    return {"version": services_of(request).version}


async def _named(services: Services, model: str) -> str:
    try:
        return (await services.models.find(model)).queue
    except ApiError as error:
        if services.keys_on and error.status == 404:
            raise ApiError(404, ANONYMOUS, param="model", code=error.code) from error
        raise


async def _unready(services: Services, names: Sequence[str]) -> str | None:
    if services.pipeline.drain.draining:
        return "this gateway is shutting down"
    broken = services.liveness()
    if broken is not None:
        return broken
    try:
        return await _unable(services, names)
    except BackendUnavailable:
        return "the request queue cannot be reached"


async def _unable(services: Services, names: Sequence[str]) -> str | None:
    """Returns why no model can be served; None if one can."""
    reasons: list[str] = []
    for model in names:
        reason = await services.engines.why_unable(model, services.settings.max_step_age)
        if reason is None:
            return None
        reasons.append(reason)
    return "; ".join(reasons) or "no model is registered yet"
