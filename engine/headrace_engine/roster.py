"""The requests that this engine owns, from lease to ending.

Carries each through recovery, its run in the engine's core, control messages and its outcome. When
to take, beat or drain is the worker's business; what a client has seen is its gateway's.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from headrace_common.errors import FailureCode
from headrace_common.messages import (
    Cancel,
    ChoiceState,
    Control,
    Disown,
    Drain,
    Failed,
    Reroute,
    Resend,
    Resume,
    StopChoice,
    Takeover,
)
from headrace_common.protocol.base import Beat, EngineQueue, Lease, Outcome, Progress, Verdict

from .active import ActiveRequest
from .compilation import Compilation
from .endings import failure_of, log_fields, summary
from .errors import RequestError
from .loop import EngineLoop
from .metrics import EngineMetrics
from .outbox import Outbox, persist
from .outputs import SequenceOutput
from .request import EngineRequest, FinishReason

logger = logging.getLogger(__name__)


class Roster:
    """All methods run on the event loop's thread; none blocks. `busy` is set while it holds any.

    `beat` renews the leases of some requests and acts on the verdicts, where Redis can be reached.
    `changed` is called when room may have come free, `failed` with an error that is a bug.
    `resume_timeout` (seconds): how long a gateway may take to say what its client has before it is
    checked whether the gateway lives. `compilation` prepares requests that must match something.
    """

    def __init__(
        self,
        *,
        queue: EngineQueue,
        loop: EngineLoop,
        compilation: Compilation,
        outbox: Outbox,
        metrics: EngineMetrics,
        beat: Callable[[Sequence[ActiveRequest]], Awaitable[None]],
        changed: Callable[[], None],
        failed: Callable[[BaseException], None],
        resume_timeout: float,
    ) -> None:
        self._queue = queue
        self._loop = loop
        self._compilation = compilation
        self._outbox = outbox
        self._metrics = metrics
        self._beat = beat
        self._changed = changed
        self._failed = failed
        self._resume_timeout = resume_timeout
        self.busy = asyncio.Event()
        self._active: dict[str, ActiveRequest] = {}
        self._by_engine_key: dict[str, ActiveRequest] = {}
        self._resumes: dict[str, asyncio.Future[Resume]] = {}
        self._suspects: list[ActiveRequest] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._compiling: dict[str, asyncio.Task[None]] = {}

    @property
    def requests(self) -> Collection[ActiveRequest]:
        return self._active.values()

    @property
    def sequences(self) -> int:
        return sum(active.request.sampling.branches for active in self._active.values())

    @property
    def has_suspect(self) -> bool:
        return bool(self._suspects)

    async def begin(self, leases: Sequence[Lease]) -> None:
        """Starts leases; where others had begun, the gateways first say what their clients have."""
        enrolled = [self._enrol(lease) for lease in leases]
        for active in enrolled:
            if active in self._suspects:
                self._start_suspect()
            elif active.recovered:
                self._recover(active)
        fresh = [a for a in enrolled if not a.recovered and a not in self._suspects]
        if fresh:
            await self._execute(fresh)

    def _enrol(self, lease: Lease) -> ActiveRequest:
        earlier = self._active.get(lease.request.request_id)
        active = ActiveRequest(lease)
        if earlier is not None:
            # Redis lost and regained it while it ran here: the gateway says where it goes on.
            self.drop(earlier)
            active.recovered = True
        self._active[active.request_id] = active
        self.busy.set()
        self._metrics.taken(active.request, active.attempt, lease.placed, lease.waited)
        if lease.suspect:
            self._suspects.append(active)
        return active

    def _start_suspect(self) -> None:
        """Runs a suspect alone: it may take the engine down, and then only itself with it."""
        if self._suspects and len(self._active) == len(self._suspects):
            self._recover(self._suspects[0])

    async def _execute(self, requests: Sequence[ActiveRequest]) -> None:
        """Runs them; the queue hears first, so that one that kills the engine is counted."""
        for active in requests:
            active.executing = True
        await self._beat(requests)
        for active in requests:
            if self._owns(active):
                self._run(active)

    def _run(self, active: ActiveRequest) -> None:
        request = active.engine_request()
        self._by_engine_key[request.request_id] = active
        if request.params.structured_outputs is None:
            self._start(active, request)
        else:
            task = self._spawn(self._compile_and_start(active, request))
            self._compiling[request.request_id] = task
            task.add_done_callback(lambda _: self._compiling.pop(request.request_id))

    async def _compile_and_start(self, active: ActiveRequest, request: EngineRequest) -> None:
        try:
            request = await self._compilation.complete(request)
        except RequestError as error:
            self.on_rejected(request.request_id, error)
        if self._by_engine_key.get(request.request_id) is active:
            self._start(active, request)

    def _start(self, active: ActiveRequest, request: EngineRequest) -> None:
        self._loop.add(request)
        for number, choice in enumerate(active.choices):
            if choice.finish_reason is not None:
                self._loop.abort(request.request_id, number)

    # Recovery

    def _recover(self, active: ActiveRequest) -> None:
        self._spawn(self._take_over(active))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    async def _take_over(self, active: ActiveRequest) -> None:
        states = await self._said_so_far(active)
        if states is None:
            return
        owned = await persist(
            lambda: self._queue.resume(active.request_id, active.attempt, states), "resume"
        )
        if not self._owns(active):
            return
        if not owned:
            self.drop(active)
            return
        active.restore(states)
        if active.finished:
            self._end(active, active.outcome())
        else:
            active.executing = True  # resume() has said so to the queue
            self._run(active)

    async def _said_so_far(self, active: ActiveRequest) -> Sequence[ChoiceState] | None:
        """What the client has: from its gateway while that lives, else from the journal.

        None where the request was dropped meanwhile.
        """
        while self._owns(active):
            answer = await self._ask_gateway(active)
            if answer is not None:
                return answer.choices if self._owns(active) else None
            if not await persist(
                lambda: self._queue.gateway_alive(active.gateway_id), "look for a gateway"
            ):
                states = await persist(
                    lambda: self._queue.journal(active.request_id), "read a journal"
                )
                if states is None and self._owns(active):
                    self._fail(active, FailureCode.LOST, "its state is lost; send it again")
                return states
        return None

    async def _ask_gateway(self, active: ActiveRequest) -> Resume | None:
        future: asyncio.Future[Resume] = asyncio.get_running_loop().create_future()
        self._resumes[active.request_id] = future
        active.asked += 1
        self._outbox.put(
            active.gateway_id,
            Takeover(request_id=active.request_id, attempt=active.attempt, round=active.asked),
        )
        try:
            async with asyncio.timeout(self._resume_timeout):
                return await future
        except TimeoutError:
            return None
        finally:
            if self._resumes.get(active.request_id) is future:
                del self._resumes[active.request_id]

    # What the engine's core says

    def on_output(self, output: SequenceOutput) -> int:
        """Passes new tokens on; returns how many."""
        active = self._by_engine_key.get(output.request_id)
        if active is not None and output.finish_reason is FinishReason.ERROR:
            self._fail(active, *failure_of(output))
            return 0
        if active is not None and output.reason is not None and not active.has_output:
            self._fail(active, FailureCode.DEADLINE, output.reason)
            return 0
        tokens = None if active is None else active.record(output)
        if active is None or tokens is None:
            return 0
        self._metrics.produced(active.request_id, len(tokens.token_ids))
        self._outbox.put(active.gateway_id, tokens)
        if active.finished:
            self._end(active, active.outcome())
        return len(tokens.token_ids)

    def on_rejected(self, engine_key: str, error: RequestError) -> None:
        active = self._by_engine_key.get(engine_key)
        if active is not None:
            self._fail(active, FailureCode.INVALID, str(error))

    # Endings

    def cancel_orphans(self, gateway_id: str, gone_for: float) -> None:
        """Ends requests of a gateway that is gone for longer (seconds) than they may wait."""
        orphans = [
            one
            for one in self._active.values()
            if one.gateway_id == gateway_id and one.request.window_ms / 1000 <= gone_for
        ]
        for active in orphans:
            logger.info("request cancelled: its gateway is gone", extra=log_fields(active))
            self._fail(active, FailureCode.ABANDONED, "its gateway is gone")

    def drop(self, active: ActiveRequest) -> None:
        """Stops a request without telling anyone: it is another's, or was given back."""
        if self._owns(active):
            self._metrics.dropped(active.request_id)
        self._forget(active)

    def _end(self, active: ActiveRequest, outcome: Outcome) -> None:
        self._outbox.end(active.request_id, active.attempt, outcome)
        self._metrics.ended(active.request, outcome)
        self._forget(active)
        logger.info("request ended", extra={**log_fields(active), **summary(outcome)})

    def _fail(self, active: ActiveRequest, failure: FailureCode, message: str) -> None:
        failed = Failed(
            request_id=active.request_id,
            attempt=active.attempt,
            failure=failure,
            message=message,
        )
        self._outbox.put(active.gateway_id, failed)
        states = tuple(choice.state() for choice in active.choices)
        self._end(active, Outcome(choices=states, failed=failed))

    def _forget(self, active: ActiveRequest) -> None:
        self._stop_run(active)
        if self._owns(active):
            del self._active[active.request_id]
        if not self._active:
            self.busy.clear()
        if active in self._suspects:
            self._suspects.remove(active)
        self._start_suspect()
        self._changed()

    def _owns(self, active: ActiveRequest) -> bool:
        return self._active.get(active.request_id) is active

    # Control messages

    def obey(self, control: Control) -> None:
        assert not isinstance(control, Drain), "draining is the worker's business"
        active = self._active.get(control.request_id)
        if active is None:
            return
        match control:
            case Resume() | Disown():
                if control.attempt == active.attempt:
                    self._answered(active, control)
            case Cancel():
                self._fail(active, FailureCode.CANCELLED, "cancelled")
            case StopChoice():
                self._stop_choice(active, control.choice)
            case Resend():
                if control.choice < len(active.choices):
                    tokens = active.tokens_from(control.choice, control.index)
                    self._outbox.put(active.gateway_id, tokens)
            case Reroute():
                self._reroute(active, control.gateway_id)

    def _answered(self, active: ActiveRequest, answer: Resume | Disown) -> None:
        if isinstance(answer, Resume):
            self._resumed(active, answer)
        elif answer.superseded:
            self.drop(active)
        else:
            self._spawn(self._fail_unless_rerouted(active))

    def _resumed(self, active: ActiveRequest, resume: Resume) -> None:
        waiting = self._resumes.get(active.request_id)
        if waiting is not None:
            if resume.round == active.asked and not waiting.done():
                waiting.set_result(resume)
        elif resume.round == 0 and self._stop_run(active):
            # Unasked: the gateway has another history than this run, which starts over from it.
            active.executing = False
            self._recover(active)

    def _stop_run(self, active: ActiveRequest) -> bool:
        """Ends its run in the engine's core, if it has one."""
        if self._by_engine_key.pop(active.engine_key, None) is None:
            return False
        self._loop.abort(active.engine_key)
        if (compiling := self._compiling.get(active.engine_key)) is not None:
            compiling.cancel()
        return True

    async def _fail_unless_rerouted(self, active: ActiveRequest) -> None:
        """Its gateway does not know it; another one may, which a beat tells."""
        gateway_id = active.gateway_id
        await self._beat([active])
        if self._owns(active) and active.gateway_id == gateway_id:
            self._fail(active, FailureCode.ABANDONED, "no gateway knows it")

    def _stop_choice(self, active: ActiveRequest, number: int) -> None:
        if number >= len(active.choices):
            return
        active.stop(number)
        self._loop.abort(active.engine_key, number)
        if active.finished:
            self._end(active, active.outcome())

    def _reroute(self, active: ActiveRequest, gateway_id: str) -> None:
        if gateway_id and gateway_id != active.gateway_id:
            active.gateway_id = gateway_id
            if active.executing:
                self._outbox.put(gateway_id, active.sync())

    # Beats

    def heed(self, said: Sequence[Progress], beats: Mapping[str, Beat]) -> None:
        """Acts on the queue's verdicts on `said`."""
        for progress in said:
            active = self._active.get(progress.request_id)
            beat = beats.get(progress.request_id)
            if active is not None and active.attempt == progress.attempt and beat is not None:
                self._heed(active, beat)

    def _heed(self, active: ActiveRequest, beat: Beat) -> None:
        match beat.verdict:
            case Verdict.OWNED:
                active.note_journal(beat.journaled)
                self._reroute(active, beat.gateway_id)
            case Verdict.STOLEN:
                logger.info("request taken over by another engine", extra=log_fields(active))
                self.drop(active)
            case Verdict.CANCELLED:
                self._fail(active, FailureCode.CANCELLED, "cancelled")
            case Verdict.EXPIRED:
                self._fail(active, FailureCode.DEADLINE, "its deadline is over")
            case Verdict.MISSING:
                logger.warning("redis has lost a running request", extra=log_fields(active))

    async def close(self) -> None:
        """Ends what waits for gateways."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
