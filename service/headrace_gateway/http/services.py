"""The collaborators of routes: built once in create_app, given to each request."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from fastapi import Request

from headrace_common.protocol.adapter_control import AdapterControl

from ..batches.batch_service import BatchService
from ..console.engine_supervisor import EngineSupervisor
from ..console.live_feed import LiveFeed
from ..console.page_files import PageFile
from ..console.recent_requests import RecentRequests
from ..errors import invalid
from ..generation.admission import BODY_ARRIVED, Admission
from ..generation.pipeline import BODY_SIZE, Pipeline
from ..generation.prompts import PromptEncoder
from ..generation.resumable_response import ResumableRequests
from ..limits.tenants import Caller, ReadAccess, batch_of, caller_of
from ..models.models import Models
from ..parsing.chat_output import ChatOutput
from ..queue_client.engines import EngineDirectory
from ..schemas.completions import UNSUPPORTED, BodyType, Refused, parse
from ..settings import GatewaySettings
from .body import BUFFERED_BODY


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The collaborators of routes. `models` and `pipeline` are the caller's.

    `notice` returns a problem that does not affect readiness but that an operator should know, or
    None.
    """

    settings: GatewaySettings
    models: Models
    pipeline: Pipeline
    engines: EngineDirectory
    liveness: Callable[[], str | None]
    notice: Callable[[], str | None]
    version: str
    chat_output: ChatOutput
    live_feed: LiveFeed
    recent_requests: RecentRequests
    page_files: Mapping[str, PageFile]
    supervisor: EngineSupervisor | None = None
    keys_on: bool = False
    batch_service: BatchService | None = None
    adapter_control: AdapterControl | None = None

    def of(self, caller: Caller | None, batch: str | None) -> "Services":
        """Returns the services as this caller, or this batch, may use them."""
        if caller is None:
            return replace(self, pipeline=replace(self.pipeline, batch=batch))
        work = self.pipeline.work.of(caller.tenant)
        pipeline = replace(self.pipeline, caller=caller, batch=batch, work=work)
        return replace(self, models=self.models.only(caller.key.allows), pipeline=pipeline)

    @property
    def admission(self) -> Admission:
        return self.pipeline.admission

    @property
    def resumable(self) -> ResumableRequests:
        return self.pipeline.resumable

    @property
    def prompts(self) -> PromptEncoder:
        return self.pipeline.prompts

    @property
    def lenient(self) -> bool:
        """Whether unknown fields of requests are ignored."""
        return not self.settings.strict_requests

    @property
    def batches(self) -> BatchService:
        """Files and batches. Raises ApiError if this server stores none."""
        if self.batch_service is None:
            raise invalid("This server stores no files and runs no batches.", code="no_batches")
        return self.batch_service

    @property
    def read_access(self) -> ReadAccess:
        """The stored data that the caller may read."""
        return ReadAccess(self.pipeline.tenant, self.models.allows)

    async def body(
        self, request: Request, kind: type[BodyType], refused: Refused = UNSUPPORTED
    ) -> BodyType:
        """Reads and checks the request's body. Raises ApiError."""
        # joined in one expression, so that the stream keeps no copy
        raw = b"".join([chunk async for chunk in request.stream()])
        state = request.scope["state"]
        state[BODY_SIZE], state[BODY_ARRIVED] = len(raw), asyncio.get_running_loop().time()
        read = partial(parse, kind, raw, refused, lenient=self.lenient)
        body = await self.pipeline.work.run(len(raw), read)
        state[BUFFERED_BODY].drop()
        return body


def services_of(request: Request) -> Services:
    """Returns the services as the caller of this request may use them."""
    # This is not a dependency of the framework, because that would cost each request several times
    # as much.
    services = request.app.state.services
    assert isinstance(services, Services)
    state = request.scope["state"]
    caller, batch = caller_of(state), batch_of(state)
    return services if caller is None and batch is None else services.of(caller, batch)
