"""GET /health/live, /health/ready, /version.

Live: this process answers. Ready: some engine of every model has made a step lately or could.
"""

from fastapi import APIRouter

from headrace_common.errors import BackendUnavailable

from ..errors import unavailable
from ..services import Services, WithServices

router = APIRouter()


@router.get("/health/live")
async def live(services: WithServices) -> dict[str, str]:
    """Whether this process can go on; says nothing of the engines."""
    broken = services.liveness()
    if broken is not None:
        raise unavailable(f"Not live: {broken}.", code="not_live")
    return {"status": "ok"}


@router.get("/health/ready")
async def ready(services: WithServices) -> dict[str, str]:
    """Whether a request would be worked on now; 503 with the reason where not."""
    reason = await _unready(services)
    if reason is not None:
        raise unavailable(f"Not ready: {reason}.", code="not_ready")
    return {"status": "ok"}


@router.get("/version")
async def version(services: WithServices) -> dict[str, str]:
    return {"version": services.version}


async def _unready(services: Services) -> str | None:
    if services.drain.draining:
        return "this gateway is shutting down"
    broken = services.liveness()
    if broken is not None:
        return broken
    try:
        for model in services.models.names:
            reason = await services.engines.able(model, services.settings.max_step_age)
            if reason is not None:
                return reason
    except BackendUnavailable:
        return "the request queue cannot be reached"
    return None
