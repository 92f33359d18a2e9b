"""The thread that owns an engine: it takes commands from an inbox and passes outputs to a callback.

Without work it blocks on a condition, so an idle engine uses no CPU. It does no I/O. Callbacks run
in this thread and must return quickly.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from threading import Condition, Thread

from ..core.batch_snapshot import BatchSnapshot
from ..core.errors import RequestError
from ..core.outputs import SequenceOutput
from ..core.request import EngineRequest
from ..core.stats import SchedulerStats
from .engine import Engine
from .profiler import StepProfiler

OnStep = Callable[[list[SequenceOutput], SchedulerStats, float | None], None]
OnRejected = Callable[[str, RequestError], None]
OnFailure = Callable[[Exception], None]


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str
    choice: int | None


@dataclass(frozen=True, slots=True)
class _Capture:
    most: int
    on_captured: Callable[[BatchSnapshot], None]


@dataclass(frozen=True, slots=True)
class _Call:
    action: Callable[[], None]


# A command: a request to add, an abort, a snapshot to take, or another action between two steps.
_Command = EngineRequest | _Abort | _Capture | _Call


class _Mode(Enum):
    SERVE = "serve"
    DRAIN = "drain"  # refuse new requests, end when the others are finished
    STOP = "stop"  # end after the current step


class EngineLoop:
    """Runs an engine's steps in its own thread. All public methods are thread-safe.

    `on_step` gets each step's outputs, the statistics after it and its seconds. After aborts that
    leave the engine without work it gets no outputs and None as seconds. `on_rejected` gets the id
    of a request that cannot run; if it was added after drain or stop, the adding thread makes the
    call. An exception of the engine or of a callback goes to `on_failure` once, and the loop ends:
    the state after a failed step is unknown, so the process must end. `clock` is monotonic, in
    seconds.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_step: OnStep,
        on_rejected: OnRejected,
        on_failure: OnFailure,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._on_step = on_step
        self._on_rejected = on_rejected
        self._on_failure = on_failure
        self._clock = clock
        self.profiler = StepProfiler()
        self._condition = Condition()
        self._inbox: deque[_Command] = deque()
        self._mode = _Mode.SERVE
        self._busy = False
        self._last_step_at = clock()
        # A daemon, so that a step that hangs on its device does not keep the process alive.
        self._thread = Thread(target=self._run, name="engine-loop", daemon=True)

    @property
    def busy(self) -> bool:
        """Whether the engine has work. Only then does an old `last_step_at` mean that it hangs."""
        return self._busy

    @property
    def last_step_at(self) -> float:
        """The time when the last step ended, or when an idle engine got work."""
        return self._last_step_at

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def add(self, request: EngineRequest) -> None:
        self._post(request)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self._post(_Abort(request_id, choice))

    def capture(self, most: int, on_captured: Callable[[BatchSnapshot], None]) -> None:
        """Has `on_captured` called, in the engine's thread, with a snapshot after the current step.

        It is not called if the loop ends before.
        """
        self._post(_Capture(most, on_captured))

    def between_steps(self, action: Callable[[], None]) -> None:
        """Has `action` called in the engine's thread after the current step.

        It is not called if the loop ends before. If it raises, the engine has failed.
        """
        self._post(_Call(action))

    def drain(self) -> None:
        """Refuses new requests, and ends the loop when the present ones are finished."""
        self._set_mode(_Mode.DRAIN)

    def stop(self) -> None:
        """Ends the loop after the current step; unfinished requests get no more outputs."""
        self._set_mode(_Mode.STOP)

    def join(self, timeout: float | None = None) -> bool:
        """Waits up to `timeout` seconds for the loop to end; returns whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _post(self, command: _Command) -> None:
        with self._condition:
            refused = self._mode is not _Mode.SERVE and isinstance(command, EngineRequest)
            if not refused:
                self._inbox.append(command)
                self._condition.notify()
        if refused and isinstance(command, EngineRequest):
            error = RequestError("the engine is stopping: send the request to another one")
            self._on_rejected(command.request_id, error)

    def _set_mode(self, mode: _Mode) -> None:
        with self._condition:
            if self._mode is not _Mode.STOP:
                self._mode = mode
            self._condition.notify()

    def _run(self) -> None:
        try:
            while (commands := self._next_commands()) is not None:
                self._turn(commands)
        except Exception as error:  # noqa: BLE001 - reported to on_failure; the thread ends
            self.stop()
            self._on_failure(error)
        finally:
            self._busy = False

    def _next_commands(self) -> list[_Command] | None:
        """Takes the inbox's commands; waits for one if there is no work. None ends the loop."""
        with self._condition:
            self._busy = self._engine.has_work
            while not self._inbox and not self._busy and self._mode is _Mode.SERVE:
                self._condition.wait()
            commands = list(self._inbox)
            self._inbox.clear()
            if self._mode is _Mode.STOP or not (commands or self._busy):
                return None
        if not self._busy:
            self._last_step_at = self._clock()
            self._busy = True
        return commands

    def _turn(self, commands: list[_Command]) -> None:
        for command in commands:
            self._handle(command)
        if self._engine.has_work:
            begun = self._clock()
            outputs = self.profiler.step(self._engine.step)
            self._last_step_at = self._clock()
            self._on_step(outputs, self._engine.stats(), self._last_step_at - begun)
        elif any(isinstance(command, _Abort) for command in commands):
            self._on_step([], self._engine.stats(), None)

    def _handle(self, command: _Command) -> None:
        if isinstance(command, _Abort):
            self._engine.abort(command.request_id, command.choice)
            return
        if isinstance(command, _Capture):
            command.on_captured(self._engine.snapshot(command.most))
            return
        if isinstance(command, _Call):
            command.action()
            return
        try:
            self._engine.add_request(command)
        except RequestError as error:
            self._on_rejected(command.request_id, error)
