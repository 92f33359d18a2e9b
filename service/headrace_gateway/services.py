"""What routes work with: built once in create_app, handed to each request."""

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Response

from headrace_common.keys import new_request_id
from headrace_common.sampling import SamplingParams

from .admission import Admission, Job
from .answers import Answer, AnswerOptions
from .drain import Drain
from .engines import EngineDirectory
from .models import Models, ServedModel
from .observation import Observer, RequestInfo
from .prompts import PromptEncoder
from .responding import Delivery, Exchange, GenerationResponse
from .run import Usage
from .schemas import SamplingBody
from .settings import GatewaySettings

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A kind of generation, and what makes the body of its answer."""

    name: str
    answer: Callable[[AnswerOptions], Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What to run: `encode` makes the prompts' token ids, which takes time and may be refused."""

    model: ServedModel
    sampling: SamplingParams
    encode: Callable[[], Awaitable[list[list[int]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    settings: GatewaySettings
    models: Models
    prompts: PromptEncoder
    engines: EngineDirectory
    admission: Admission
    observer: Observer
    delivery: Delivery
    drain: Drain
    liveness: Callable[[], str | None]
    version: str

    async def generate(
        self, operation: Operation, request: Request, body: SamplingBody, call: Call
    ) -> Response:
        """The response that runs a call. Raises what refuses it before it is queued."""
        headers = dict(request.headers)
        client_id = client_request_id(headers)
        info = RequestInfo(
            request_id=new_request_id(),
            client_request_id=client_id,
            operation=operation.name,
            model=call.model.name,
            sampling=call.sampling,
            stream=body.stream,
            headers=headers,
        )
        observation = self.observer.start(info)
        try:
            job = await _job(call, body, info.request_id, observation.trace)
            requests = await self.admission.prepare(job, headers)
        except BaseException as error:
            observation.end(Usage(), getattr(error, "code", None) or "request_invalid")
            raise
        exchange = Exchange(
            job=job,
            requests=requests,
            answer=operation.answer(_answer_options(job, body, info.request_id)),
            observation=observation,
            stream=body.stream,
            include_usage=body.include_usage,
            headers={"x-request-id": client_id or info.request_id},
        )
        return GenerationResponse(exchange, self.admission, self.delivery, self.drain)


async def _job(call: Call, body: SamplingBody, request_id: str, trace: Mapping[str, str]) -> Job:
    return Job(
        request_id=request_id,
        model=call.model,
        prompts=await call.encode(),
        sampling=call.sampling,
        priority=body.priority,
        cache_salt=body.cache_salt,
        trace=trace,
    )


def _answer_options(job: Job, body: SamplingBody, request_id: str) -> AnswerOptions:
    return AnswerOptions(
        answer_id=request_id,
        model=job.model.name,
        created=int(time.time()),
        tokenizer=job.model.tokenizer,
        choices=job.sampling.n * len(job.prompts),
        choices_per_prompt=job.sampling.n,
        logprobs=job.sampling.logprobs,
        include_usage=body.include_usage,
        prompts=tuple(map(tuple, job.prompts)) if body.return_token_ids else None,
    )


def client_request_id(headers: Mapping[str, str]) -> str | None:
    """The caller's own name for the request, to find it in logs; never a key to anything."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else None


def _services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


WithServices = Annotated[Services, Depends(_services)]
