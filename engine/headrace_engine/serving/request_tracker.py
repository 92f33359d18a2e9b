"""Tracks the requests that this engine has leased, from lease to outcome.

It handles their recovery, their runs in the engine's core, control messages and verdicts. The
worker decides when to take requests, renew leases and drain; gateways know what clients have.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from headrace_common.errors import BackendUnavailable, FailureCode, RequestFailed
from headrace_common.protocol.base import Beat, EngineQueue, EngineStatus, Lease, Outcome, Verdict
from headrace_common.wire.messages import (
    Cancel,
    ChoiceState,
    Control,
    Disown,
    Drain,
    Recall,
    Reroute,
    Resend,
    Resume,
    StopChoice,
    Takeover,
    Watch,
)

from ..core.errors import RequestError
from ..core.outputs import SequenceOutput
from ..core.request import EngineRequest
from ..engine.engine_loop import EngineLoop
from .grammar_compilation import GrammarCompilation
from .image_reading import ImageReading
from .leased_request import LeasedRequest
from .metrics import EngineMetrics
from .reply_writer import ReplyWriter, retry

logger = logging.getLogger(__name__)

_REMEMBERED = 10_000  # requests whose attempts an engine remembers


class RequestTracker:
    """Owns the leased requests of one engine. All methods run on the event loop; none blocks.

    `status` makes the engine's status for a beat, given the number of sequences. `on_room` is
    called when room may have become free, `on_error` with an error that is a bug. Neither may call
    the tracker. A gateway has `resume_timeout` seconds to tell what its client has; then it is
    checked whether the gateway is alive. A token's KV takes `kv_bytes_per_token`.

    `requests` is a live view, `by_engine_key` one of those that run. `busy` is set while there are
    requests.
    """

    def __init__(
        self,
        *,
        queue: EngineQueue,
        loop: EngineLoop,
        compilation: GrammarCompilation,
        images: ImageReading,
        reply_writer: ReplyWriter,
        metrics: EngineMetrics,
        status: Callable[[int], EngineStatus],
        on_room: Callable[[], None],
        on_error: Callable[[BaseException], None],
        resume_timeout: float,
        kv_bytes_per_token: float = 0.0,
    ) -> None:
        self._queue = queue
        self._loop = loop
        self._compilation = compilation
        self._images = images
        self._reply_writer = reply_writer
        self._metrics = metrics
        self._status = status
        self._on_room = on_room
        self._on_error = on_error
        self._resume_timeout = resume_timeout
        self._kv_bytes_per_token = kv_bytes_per_token
        # of all requests: a request that is leased again has at least this number
        self._rounds = count(1)
        self.busy = asyncio.Event()
        self._requests: dict[str, LeasedRequest] = {}
        self._attempts: dict[str, int] = {}  # the last one of each request, the newest at the end
        self._by_engine_key: dict[str, LeasedRequest] = {}
        self.by_engine_key: Mapping[str, LeasedRequest] = self._by_engine_key
        self.requests: Collection[LeasedRequest] = self._requests.values()

    @property
    def sequences(self) -> int:
        return sum(leased.request.sampling.branches for leased in self.requests)

    @property
    def has_suspect(self) -> bool:
        return any(leased.suspect for leased in self.requests)

    def adapters(self) -> set[str]:
        """The adapters of all requests."""
        return {each.request.adapter for each in self.requests if each.request.adapter is not None}

    async def begin(self, leases: Sequence[Lease]) -> None:
        """Starts leased requests. If another engine had begun one, its gateway is asked first."""
        fresh = []
        for leased in [self._register(lease) for lease in leases]:
            if leased.suspect:
                self._start_suspect()
            elif leased.recovered:
                self._recover(leased)
            else:
                leased.executing = True
                fresh.append(leased)
        if fresh:
            await self.beat(fresh)  # first, so that the queue counts runs that kill the engine
            for leased in fresh:
                if self._owns(leased):
                    self._run(leased)

    def _register(self, lease: Lease) -> LeasedRequest:
        request_id = lease.request.request_id
        leased = LeasedRequest(lease, self._metrics.taken(lease), self._kv_bytes_per_token)
        if (earlier := self._requests.get(request_id)) is not None:
            self._forget(earlier)
        if earlier is not None or lease.attempt <= self._attempts.get(request_id, 0):
            # Redis lost and regained it after it ran here: the gateway tells what its client has.
            leased.recovered = True
        self._attempts.pop(request_id, None)
        self._attempts[request_id] = lease.attempt
        if len(self._attempts) > _REMEMBERED:
            del self._attempts[next(iter(self._attempts))]
        self._requests[request_id] = leased
        self.busy.set()
        return leased

    def _start_suspect(self) -> None:
        """Runs a suspect alone: if it kills the engine, no other request is affected."""
        waiting = all(one.suspect and not self._has_begun(one) for one in self.requests)
        if self._requests and waiting:
            self._recover(next(iter(self.requests)))

    def _has_begun(self, leased: LeasedRequest) -> bool:
        return bool(leased.tasks) or self._runs(leased)

    def _runs(self, leased: LeasedRequest) -> bool:
        """Whether the engine's core has the request.

        It does not while a takeover waits for its answer.
        """
        return leased.engine_key in self._by_engine_key

    # Runs in the engine's core

    def _run(self, leased: LeasedRequest) -> None:
        request = leased.engine_request()
        self._by_engine_key[request.request_id] = leased
        leased.meter.start(leased.tokens)
        if request.params.structured_outputs is None and not leased.request.images:
            self._start(leased, request)
        else:
            self._spawn(leased, self._complete_and_start(leased, request))

    async def _complete_and_start(self, leased: LeasedRequest, request: EngineRequest) -> None:
        """Compiles the request's grammar and reads its images first."""
        try:
            if request.params.structured_outputs is not None:
                request = await self._compilation.complete(request)
            request = await self._images.complete(leased.request, request)
        except RequestError as error:
            self._fail(leased, FailureCode.INVALID, str(error))
        except RequestFailed as error:
            self._fail(leased, error.failure, str(error))
        else:
            self._start(leased, request)

    def _start(self, leased: LeasedRequest, request: EngineRequest) -> None:
        self._loop.add(request)
        for number, choice in enumerate(leased.choices):
            if choice.finish_reason is not None:
                self._loop.abort(request.request_id, number)

    def _stop_run(self, leased: LeasedRequest) -> None:
        """Ends the request's run in the engine's core, and its background tasks."""
        if self._by_engine_key.pop(leased.engine_key, None) is not None:
            self._loop.abort(leased.engine_key)
            leased.meter.stop(leased.tokens)
        for task in leased.tasks - {asyncio.current_task()}:
            task.cancel()

    def _spawn(self, leased: LeasedRequest, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` until the request ends, is dropped or starts again."""
        task = asyncio.create_task(work)
        leased.tasks.add(task)
        task.add_done_callback(partial(self._on_task_done, leased))

    def _on_task_done(self, leased: LeasedRequest, task: asyncio.Task[None]) -> None:
        leased.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    # Recovery

    def _recover(self, leased: LeasedRequest) -> None:
        self._spawn(leased, self._take_over(leased))

    async def _take_over(self, leased: LeasedRequest) -> None:
        """Continues after the last token that the client has."""
        states = await self._client_output(leased)
        if states is None:
            self._fail(leased, FailureCode.LOST, "the request's state is lost; send it again")
        elif leased.foreign and _must_continue(states):
            await self._leave_to_own_side(leased)
        elif not await retry(
            lambda: self._queue.resume(leased.request_id, leased.attempt, states), "resume"
        ):
            self._forget(leased)
        else:
            leased.restore(states)
            if leased.finished:
                self._end(leased, leased.outcome())
            else:
                leased.executing = True  # resume() has told the queue
                self._run(leased)

    async def _leave_to_own_side(self, leased: LeasedRequest) -> None:
        """Gives back a request whose client has tokens of other weights than this engine's."""
        if leased.abandoned:
            message = "the revision of the model that began this answer is gone; send it again"
            self._fail(leased, FailureCode.LOST, message)
            return
        ids = [leased.request_id]
        await retry(lambda: self._queue.give_back(ids, for_own_side=True), "give back")
        self._forget(leased)

    async def _client_output(self, leased: LeasedRequest) -> Sequence[ChoiceState] | None:
        """Asks for the client's tokens: its gateway if that is alive, else the journal."""
        while True:
            answer = await self._ask_gateway(leased)
            if answer is not None:
                return answer.choices
            if not await retry(
                lambda: self._queue.gateway_alive(leased.gateway_id), "look for a gateway"
            ):
                return await retry(lambda: self._queue.journal(leased.request_id), "read a journal")

    async def _ask_gateway(self, leased: LeasedRequest) -> Resume | None:
        """Asks what the client has; None if the gateway does not answer in time."""
        leased.answer = asyncio.get_running_loop().create_future()
        leased.round = next(self._rounds)
        self._reply_writer.put(
            leased.gateway_id,
            Takeover(
                request_id=leased.request_id,
                attempt=leased.attempt,
                round=leased.round,
                rounds_in_tokens=True,
            ),
        )
        try:
            async with asyncio.timeout(self._resume_timeout):
                return await leased.answer
        except TimeoutError:
            return None
        finally:
            leased.answer = None

    # Outputs of the engine's core

    def on_output(self, output: SequenceOutput) -> int:
        """Sends new tokens to the gateway; returns their number."""
        leased = self._by_engine_key.get(output.request_id)
        if leased is None:
            return 0
        if (failure := leased.failure_of(output)) is not None:
            self._fail(leased, *failure)
            return 0
        tokens = leased.record(output)
        if tokens is None:
            return 0
        self._metrics.produced(leased, len(tokens.token_ids))
        self._reply_writer.put(leased.gateway_id, tokens)
        if leased.finished:
            self._end(leased, leased.outcome())
        return len(tokens.token_ids)

    def on_rejected(self, engine_key: str, error: RequestError) -> None:
        leased = self._by_engine_key.get(engine_key)
        if leased is not None:
            self._fail(leased, FailureCode.INVALID, str(error))

    # Ends

    def cancel_orphans(self, gateway_id: str, gone_for: float) -> None:
        """Ends requests that may not wait as long as their gateway has been gone (in seconds)."""
        for leased in list(self.requests):
            if leased.gateway_id == gateway_id and leased.request.window_ms / 1000 <= gone_for:
                logger.info("request cancelled: its gateway is gone", extra=leased.log_fields)
                self._fail(leased, FailureCode.ABANDONED, "the request's gateway is gone")

    async def give_back(
        self, requests: Sequence[LeasedRequest], *, handed_over: bool = False
    ) -> None:
        """Gives requests back to the queue, for other engines; `handed_over` as in EngineQueue."""
        progress = [leased.progress() for leased in requests]
        for leased in requests:
            self._forget(leased)
        await self._reply_writer.flush()
        if requests:
            ids = [leased.request_id for leased in requests]
            status = self._status(self.sequences)
            await retry(lambda: self._queue.beat(progress, status), "last beat")
            give_back = partial(self._queue.give_back, ids, handed_over=handed_over)
            await retry(give_back, "give back")

    async def close(self) -> None:
        """Cancels the tasks that wait for gateways or grammars."""
        tasks = [task for leased in self.requests for task in leased.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, leased: LeasedRequest, outcome: Outcome) -> None:
        self._reply_writer.end(leased.request_id, leased.attempt, outcome, leased.read_usage())
        self._metrics.ended(leased, outcome)
        self._forget(leased)
        extra = {
            "output_tokens": sum(len(choice.token_ids) for choice in outcome.choices),
            "failure": None if outcome.failed is None else outcome.failed.failure.value,
        }
        logger.info("request ended", extra={**leased.log_fields, **extra})

    def _fail(self, leased: LeasedRequest, failure: FailureCode, message: str) -> None:
        failed = leased.failed(failure, message)
        self._reply_writer.put(leased.gateway_id, failed)
        self._end(leased, Outcome(choices=leased.states, failed=failed))

    def _forget(self, leased: LeasedRequest) -> None:
        """Stops and forgets a request. Without an outcome, another engine continues it."""
        self._stop_run(leased)
        if self._owns(leased):
            del self._requests[leased.request_id]
        if not self._requests:
            self.busy.clear()
        self._start_suspect()
        self._on_room()

    def _owns(self, leased: LeasedRequest) -> bool:
        return self._requests.get(leased.request_id) is leased

    # Control messages

    def handle_control(self, control: Control) -> None:
        assert not isinstance(control, Drain | Recall | Watch), "these are the worker's business"
        leased = self._requests.get(control.request_id)
        if leased is None:
            return
        match control:
            case Resume() if control.attempt == leased.attempt:
                self._handle_resume(leased, control)
            case Disown() if control.attempt == leased.attempt:
                if control.superseded:
                    self._forget(leased)
                else:
                    self._spawn(leased, self._fail_unless_rerouted(leased))
            case Cancel():
                self._fail(leased, FailureCode.CANCELLED, "the request was cancelled")
            case StopChoice():
                self._stop_choice(leased, control.choice)
            case Resend() if control.choice < len(leased.choices) and self._runs(leased):
                tokens = leased.tokens_from(control.choice, control.index)
                self._reply_writer.put(leased.gateway_id, tokens)
            case Reroute():
                self._reroute(leased, control.gateway_id)

    def _handle_resume(self, leased: LeasedRequest, resume: Resume) -> None:
        if leased.answer is not None:
            if resume.round == leased.round and not leased.answer.done():
                leased.answer.set_result(resume)
        elif resume.round == 0 and self._runs(leased):
            # Not an answer: the gateway has other tokens than this run, so the run starts again.
            self._stop_run(leased)
            leased.executing = False
            self._recover(leased)

    async def _fail_unless_rerouted(self, leased: LeasedRequest) -> None:
        """Fails a request that its gateway does not know, unless a beat names another gateway."""
        gateway_id = leased.gateway_id
        await self.beat([leased])
        if self._owns(leased) and leased.gateway_id == gateway_id:
            self._fail(leased, FailureCode.ABANDONED, "no gateway knows the request")

    def _stop_choice(self, leased: LeasedRequest, number: int) -> None:
        if number >= len(leased.choices):
            return
        leased.stop(number)
        self._loop.abort(leased.engine_key, number)
        if leased.finished:
            self._end(leased, leased.outcome())

    def _reroute(self, leased: LeasedRequest, gateway_id: str) -> None:
        if gateway_id and gateway_id != leased.gateway_id:
            leased.gateway_id = gateway_id
            if leased.executing:
                self._reply_writer.put(gateway_id, leased.sync())

    # Beats

    async def beat(self, requests: Sequence[LeasedRequest]) -> None:
        """Renews leases and the engine's status, and applies the verdicts on `requests`.

        If Redis is unreachable, the next beat does it.
        """
        progress = [leased.progress() for leased in requests]
        try:
            beats = await self._queue.beat(progress, self._status(self.sequences))
        except BackendUnavailable as error:
            logger.warning("redis unavailable, beat missed", extra={"error": str(error)})
            return
        for leased in requests:
            if self._owns(leased) and leased.request_id in beats:
                self._apply_verdict(leased, beats[leased.request_id])

    def _apply_verdict(self, leased: LeasedRequest, beat: Beat) -> None:
        match beat.verdict:
            case Verdict.OWNED:
                leased.note_journal(beat.journaled)
                self._reroute(leased, beat.gateway_id)
            case Verdict.STOLEN:
                logger.info("request taken over by another engine", extra=leased.log_fields)
                self._forget(leased)
            case Verdict.CANCELLED:
                self._fail(leased, FailureCode.CANCELLED, "the request was cancelled")
            case Verdict.EXPIRED:
                self._fail(leased, FailureCode.DEADLINE, "the request's deadline is over")
            case Verdict.MISSING:
                logger.warning(
                    "redis lost a running request, its gateway queues it again",
                    extra=leased.log_fields,
                )


def _must_continue(states: Sequence[ChoiceState]) -> bool:
    """Whether an answer has begun and not ended."""
    ended = all(state.finish_reason is not None for state in states)
    return any(state.token_ids for state in states) and not ended
