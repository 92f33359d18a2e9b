"""One batch while this gateway leads it: its lines run as requests of the lowest priority.

All progress is in Redis, so that another gateway can continue: lines that have a result are not run
again, and lines that were running find their own request in the queue.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from headrace_common.config.api_keys import ApiKey
from headrace_common.protocol.batches import (
    Batch,
    BatchProgress,
    BatchResult,
    BatchStatus,
    FileNotStored,
    TokenUsage,
)
from headrace_common.protocol.redis.batches import LEASE_S, NOTHING_USED, RedisBatches
from headrace_common.protocol.redis.files import RedisFiles

from ..errors import ApiError
from ..generation.resumable_response import ResumableRequests
from ..limits.tenant_stores import TenantStores
from ..limits.tenants import BATCH, CALLER, Caller, ReadAccess
from ..queue_client.deadlines import TIMEOUT_HEADER
from ..resumable.idempotency import KEY_HEADER, ResumeOptions
from .crash_counts import (
    ALONE_FROM,
    MAX_GATEWAYS,
    READING_INPUT,
    WRITING_RESULTS,
    CrashCounts,
    SharedExclusiveLock,
)
from .internal import InternalAnswer, InternalClient
from .items import batch_item, in_steps
from .lines import EMBEDDINGS, RESPONSES, BatchInput, Fault, Line, read_lines
from .results import Result, ResultFiles, answer_result, error_result

logger = logging.getLogger(__name__)

# The lowest priority: after all requests whose clients wait.
BATCH_PRIORITY = 1000
LONGEST_PAUSE_S = 30.0
FIRST_PAUSE_S = 1.0
TRIES = 3
_BUSY = frozenset({429, 499, 503})
SET_ASIDE = "request_failed"
NO_KEY = "The API key that created the batch is no longer valid."


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """`concurrency` lines of a batch run at once; `max_deadline` is a request's, in seconds."""

    max_lines: int
    max_line_bytes: int
    max_output_bytes: int
    concurrency: int
    max_deadline: float
    poll_interval: float = 0.5


class BatchMetrics(Protocol):
    """The counts of batches. The gateway that did something first counts it."""

    def batch_request(self, *, answered: bool) -> None: ...

    def batch_ended(self, state: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchContext:
    """The collaborators of batches. `find_key` returns the API key of an id; None: keys are off.

    `clock` gives Unix seconds of Redis.
    """

    leader: str
    batches: RedisBatches
    files: RedisFiles
    client: InternalClient
    resumable: ResumableRequests
    stores: TenantStores
    metrics: BatchMetrics
    find_key: Callable[[str], ApiKey | None] | None
    limits: BatchLimits
    clock: Callable[[], float]
    line_lock: SharedExclusiveLock = field(default_factory=SharedExclusiveLock)


class LeaseLost(Exception):
    """Another gateway leads the batch now."""


class _Busy(Exception):
    """The service takes no requests now; `answer` may have the time after which to retry."""

    def __init__(self, answer: InternalAnswer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class BatchRun:
    """Leads one batch. `run` returns when it has ended; raises LeaseLost, BackendUnavailable."""

    def __init__(self, context: BatchContext, batch: Batch) -> None:
        self._context = context
        self._batch = batch
        self._progress = batch.progress
        self._done: set[int] = set()
        self._answered = self._bytes = self._counted = 0
        self._usage = NOTHING_USED
        self._running: set[Line] = set()
        self._cancelling = batch.cancelling_at is not None
        self._crashes = CrashCounts(context.batches, batch, context.leader)

    async def run(self) -> None:
        """Runs the batch to its end, starting from its stored progress."""
        if not self._progress.status.final:
            await self._crashes.load()
            try:
                await self._lead()
            finally:
                await self._crashes.leave()
        if await self._context.batches.close(self._batch):
            self._context.metrics.batch_ended(self._progress.status.value)
        await self._context.stores.count(self._tenant, batch_item(self._batch.request))

    # Before the lines

    async def _lead(self) -> None:
        ended = max(map(self._crashes.gateways, (READING_INPUT, WRITING_RESULTS)))
        if ended >= MAX_GATEWAYS:
            message = f"{ended} gateways ended while they read or wrote this batch's files."
            await self._refuse((Fault(SET_ASIDE, message),))
            return
        async with self._crashes.started(READING_INPUT):
            source = await self._read()
        await self._crashes.cleared(READING_INPUT)
        if source.faults:
            await self._refuse(source.faults)
        else:
            await self._work(source)

    async def _read(self) -> BatchInput:
        request = self._batch.request
        try:
            file = await self._context.files.get(request.input_file_id, request.tenant)
            content = await self._context.files.content(file)
        except FileNotStored as error:
            return BatchInput(b"", (), (Fault(error.code, str(error)),), None)
        return await asyncio.to_thread(
            read_lines,
            content,
            request.endpoint,
            max_lines=self._context.limits.max_lines,
            max_line_bytes=self._context.limits.max_line_bytes,
        )

    async def _refuse(self, faults: tuple[Fault, ...]) -> None:
        await self._say(
            status=BatchStatus.FAILED,
            errors=tuple(fault.body() for fault in faults),
            ended_at=self._now,
        )

    # Lines

    async def _work(self, source: BatchInput) -> None:
        used = await self._context.batches.used(self._batch)
        for number, mark in (await self._context.batches.done(self._batch)).items():
            self._note(number, mark, used.get(number, NOTHING_USED))
        await self._say(
            status=BatchStatus.IN_PROGRESS,
            total=len(source.lines),
            model=source.model,
            models=self._models(source),
            in_progress_at=self._progress.in_progress_at or self._now,
            **self._counts,
        )
        for line in source.lines:
            if self._crashes.gateways(line.number) >= MAX_GATEWAYS:
                await self._set_aside(line)
        left = sorted(self._left(source), key=lambda line: -self._crashes.gateways(line.number))
        ended = await self._run_lines(source, iter(left))
        async with self._crashes.started(WRITING_RESULTS):
            await self._end(ended, self._left(source))

    def _models(self, source: BatchInput) -> tuple[str, ...]:
        """Returns the models whose answers the batch may have.

        A name that its key may not use is refused, or is an alias of a model that it may use.
        """
        find, request = self._context.find_key, self._batch.request
        key = None if find is None else find(request.key_id)
        if key is None or key.models is None or set(source.models) <= set(key.models):
            return source.models
        return tuple(sorted(key.models))

    def _left(self, source: BatchInput) -> list[Line]:
        """Returns the lines without a result."""
        return [line for line in source.lines if line.number not in self._done]

    async def _set_aside(self, line: Line) -> None:
        """Gives the line an error as its result, and ends its request in the queue."""
        message = (
            f"{self._crashes.gateways(line.number)} gateways ended, one after the other, while "
            "this request ran; it is not run again. Make it simpler or shorter."
        )
        logger.error("batch line set aside", extra=self._fields(line))
        await self._forget(line, running=True)
        await self._keep(line, error_result(self._batch, line, SET_ASIDE, message))

    async def _run_lines(self, source: BatchInput, left: Iterator[Line]) -> BatchStatus:
        """Runs lines until none is left, or the batch must end before that."""
        if self._cancelling:
            return BatchStatus.CANCELLED
        workers = [
            asyncio.create_task(self._run_some(source, left))
            for _ in range(self._context.limits.concurrency)
        ]
        everyone = asyncio.gather(*workers)
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.wait((everyone, watch), return_when="FIRST_COMPLETED")
            if watch.done():
                return watch.result()
            await everyone
            return BatchStatus.COMPLETED
        finally:
            for task in (watch, *workers):
                task.cancel()
            await asyncio.gather(everyone, watch, *workers, return_exceptions=True)

    async def _run_some(self, source: BatchInput, left: Iterator[Line]) -> None:
        for line in left:
            self._running.add(line)
            pause = FIRST_PAUSE_S
            while (wait := await self._run_line(source, line, pause)) is not None:
                await asyncio.sleep(wait)
                pause = min(pause * 2, LONGEST_PAUSE_S)
            self._running.discard(line)

    async def _run_line(self, source: BatchInput, line: Line, pause: float) -> float | None:
        """Runs a line to its result; returns how long to wait if the service takes no
        requests now."""
        async with self._lock(line), self._crashes.started(line.number):
            try:
                result = await self._result(source, line)
            except _Busy as busy:
                return _pause(busy.answer, pause)
            await self._vacate(line)
            await self._keep(line, result)
            await self._forget(line)
            return None

    def _lock(self, line: Line) -> AbstractAsyncContextManager[None]:
        alone = self._crashes.gateways(line.number) >= ALONE_FROM
        return self._context.line_lock.exclusive() if alone else self._context.line_lock.shared()

    async def _watch(self) -> BatchStatus:
        """Renews the lease and reports progress, until the batch must end early."""
        context, renewed = self._context, -LEASE_S
        while True:
            if context.clock() >= self._batch.request.expires_at:
                return BatchStatus.EXPIRED
            if (await context.batches.get(self._batch.request.id)).cancelling_at is not None:
                return BatchStatus.CANCELLED
            if time.monotonic() - renewed > LEASE_S / 3:
                if not await context.batches.lead(self._batch.request.id, context.leader):
                    raise LeaseLost
                renewed = time.monotonic()
            await self._say(**self._counts)
            await asyncio.sleep(context.limits.poll_interval)

    async def _keep(self, line: Line, result: Result) -> None:
        await self._count(len(result.text))
        first = await self._context.batches.keep(
            self._batch,
            line.number,
            result.text,
            answered=result.answered,
            usage=result.usage,
            starters=self._crashes.starters(line.number),
        )
        if first:
            self._context.metrics.batch_request(answered=result.answered)
        self._note(line.number, BatchResult(result.answered, len(result.text)), result.usage)

    async def _count(self, more: int) -> None:
        """Counts the results in the tenant's store from time to time, in steps of `STEP_BYTES`.

        These have run already; a full store only stops further lines.
        """
        if self._bytes + more > self._counted:
            self._counted = in_steps(self._bytes + more)
            item = batch_item(self._batch.request, self._counted)
            await self._context.stores.count(self._tenant, item)

    def _note(self, number: int, mark: BatchResult, usage: TokenUsage) -> None:
        if number not in self._done:
            self._done.add(number)
            self._answered += mark.answered
            self._bytes += mark.size
            self._usage += usage

    async def _result(self, source: BatchInput, line: Line) -> Result:
        """Returns the line's result. Raises _Busy if the queue is full or a limit is reached."""
        if self._bytes > self._context.limits.max_output_bytes:
            return error_result(
                self._batch, line, "batch_output_too_large", "The batch's results are too large."
            )
        content = await asyncio.to_thread(_content, source, line)
        answer = await self._ask(content, line)
        for _ in range(TRIES - 1):
            if answer is None or not _may_succeed_later(answer):
                break
            answer = await self._ask(content, line)
        if answer is None:
            return error_result(self._batch, line, "invalid_api_key", NO_KEY)
        return answer_result(self._batch, line, answer)

    async def _ask(self, content: bytes, line: Line) -> InternalAnswer | None:
        """Returns the answer; None if the key no longer exists. Raises _Busy."""
        context, request = self._context, self._batch.request
        # The response outlives its line under its id, as for any client.
        state: dict[str, Any] = {} if request.endpoint == RESPONSES else {BATCH: request.id}
        if context.find_key is not None:
            key = context.find_key(request.key_id)
            if key is None:
                return None
            state[CALLER] = Caller(key)
        headers = {KEY_HEADER: self._key(line), TIMEOUT_HEADER: f"{self._seconds:.3f}"}
        answer = await context.client.post(request.endpoint, content, headers, state)
        if answer.status in _BUSY and not _final(answer):
            raise _Busy(answer)
        return answer

    @property
    def _seconds(self) -> float:
        left = self._batch.request.expires_at - self._context.clock()
        return min(max(left, 1.0), self._context.limits.max_deadline)

    def _key(self, line: Line) -> str:
        return f"{self._batch.request.id}:{line.number}"

    # The batch's end

    async def _end(self, status: BatchStatus, left: list[Line]) -> None:
        await self._say(status=BatchStatus.FINALIZING, finalizing_at=self._now, **self._counts)
        await self._drop(left, status)
        batches, now = self._context.batches, self._now
        done = await batches.done(self._batch)
        batch = replace(self._batch, progress=self._progress)
        files = ResultFiles(batch, batches, self._context.files, self._context.stores, now)
        await self._say(
            status=status,
            output_file_id=await files.write(done, answered=True),
            error_file_id=await files.write(done, answered=False),
            ended_at=now,
            **self._counts,
        )

    async def _drop(self, left: list[Line], status: BatchStatus) -> None:
        """Ends what still runs, and gives every line without an answer the reason."""
        cancelled = status is BatchStatus.CANCELLED
        code = "batch_cancelled" if cancelled else "batch_expired"
        reason = "the batch was cancelled" if cancelled else "the completion window expired"
        message = f"This request could not be executed before {reason}."
        for line in self._running:
            await self._cancel(line)
        for line in left:
            await self._keep(line, error_result(self._batch, line, code, message))

    async def _cancel(self, line: Line) -> None:
        try:
            await self._context.resumable.cancel(
                await self._request_id(line), ReadAccess(self._tenant)
            )
        except ApiError:
            return  # the line was not in the queue

    async def _vacate(self, line: Line) -> None:
        """Stops counting the line's request, before its result is stored.

        A leader that dies between the two thus leaves nothing counted for good.
        """
        if self._batch.request.endpoint == EMBEDDINGS:
            request_id = await self._request_id(line)
            await self._context.resumable.embeddings.vacate(request_id, self._tenant)

    async def _forget(self, line: Line, *, running: bool = False) -> None:
        """Removes the line's request, whose result is stored, unless it can be read by its own id.

        A request that may be `running` is ended.
        """
        if self._batch.request.endpoint == RESPONSES and not running:
            return
        resumable = self._context.resumable
        forget = resumable.delete if running else resumable.forget
        try:
            await forget(await self._request_id(line), ReadAccess(self._tenant))
        except ApiError:
            return  # the request was refused, and not stored

    async def _request_id(self, line: Line) -> str:
        resume = ResumeOptions(key=self._key(line), background=False, last_event_id=None)
        return await self._context.resumable.stored.identify(resume, self._tenant)

    def _fields(self, line: Line) -> dict[str, object]:
        return {"batch_id": self._batch.request.id, "line": line.number}

    @property
    def _tenant(self) -> str:
        return self._batch.request.tenant

    # What is sent for it

    @property
    def _now(self) -> int:
        return int(self._context.clock())

    @property
    def _counts(self) -> dict[str, int]:
        failed = len(self._done) - self._answered
        return {"completed": self._answered, "failed": failed, **asdict(self._usage)}

    async def _say(self, **changes: Any) -> None:
        progress: BatchProgress = replace(self._progress, **changes)
        if progress != self._progress:
            await self._context.batches.progress(self._batch, progress)
            self._progress = progress


def _content(source: BatchInput, line: Line) -> bytes:
    """Returns the request's body as it is sent."""
    body = source.body(line)
    asked = body.get("priority")
    body["priority"] = max(asked, BATCH_PRIORITY) if type(asked) is int else BATCH_PRIORITY
    return json.dumps(body, separators=(",", ":")).encode()


def _may_succeed_later(answer: InternalAnswer) -> bool:
    return answer.status >= 500 and not _final(answer)


def _final(answer: InternalAnswer) -> bool:
    """Whether waiting changes nothing, as when the tenant's store is full."""
    return answer.headers.get("x-should-retry") == "false"


def _pause(answer: InternalAnswer, pause: float) -> float:
    retry_after = answer.headers.get("retry-after", "")
    return min(float(retry_after), LONGEST_PAUSE_S) if retry_after.isdigit() else pause
