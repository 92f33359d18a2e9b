"""The thread that owns an engine: commands come in through an inbox, outputs leave by a callback.

Without work it blocks on a condition, so idle costs no CPU. It does no I/O: what becomes of outputs
is the callbacks' business, which run in this thread and must be quick.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from threading import Condition, Thread

from .engine import Engine
from .errors import RequestError
from .outputs import SequenceOutput
from .profiling import StepProfiler
from .request import EngineRequest
from .stats import SchedulerStats

OnStep = Callable[[list[SequenceOutput], SchedulerStats, float | None], None]
OnRejected = Callable[[str, RequestError], None]
OnFailure = Callable[[Exception], None]


@dataclass(frozen=True, slots=True)
class _Add:
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str
    choice: int | None


class _Mode(Enum):
    SERVE = "serve"
    DRAIN = "drain"  # refuse what is new, end when nothing is left
    STOP = "stop"  # end after the current step, whatever is left


class EngineLoop:
    """Runs an engine's steps in a thread of its own. All public methods are thread-safe.

    `on_step` gets each step's outputs, the statistics after it and its seconds; after aborts that
    left the engine without work it gets no outputs and None for the seconds. `on_rejected` gets
    the id of a request that cannot run; for one added after drain or stop it is called by the
    thread that adds it. An exception of the engine or of a callback goes to `on_failure` once, and
    the loop ends: the state of a step that broke off is not known, so the process must go.
    `clock` counts seconds and never goes back.
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
        self._inbox: deque[_Add | _Abort] = deque()
        self._mode = _Mode.SERVE
        self._busy = False
        self._last_step_at = clock()
        # Daemonic, so that a step that hangs on its device cannot keep a dying process alive.
        self._thread = Thread(target=self._run, name="engine-loop", daemon=True)

    @property
    def busy(self) -> bool:
        """Whether the engine has work. Only then does an old `last_step_at` mean that it hangs."""
        return self._busy

    @property
    def last_step_at(self) -> float:
        """The clock at the end of the last step, or when work came to an idle engine."""
        return self._last_step_at

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def add(self, request: EngineRequest) -> None:
        self._post(_Add(request))

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self._post(_Abort(request_id, choice))

    def drain(self) -> None:
        """Refuses what is added from now on, and ends when all before it is finished."""
        self._set_mode(_Mode.DRAIN)

    def stop(self) -> None:
        """Ends after the current step; what is unfinished gets no more outputs."""
        self._set_mode(_Mode.STOP)

    def join(self, timeout: float | None = None) -> bool:
        """Waits up to `timeout` seconds for the loop to end; whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _post(self, command: _Add | _Abort) -> None:
        with self._condition:
            refused = self._mode is not _Mode.SERVE and isinstance(command, _Add)
            if not refused:
                self._inbox.append(command)
                self._condition.notify()
        if refused and isinstance(command, _Add):
            error = RequestError("the engine is stopping: send the request to another one")
            self._on_rejected(command.request.request_id, error)

    def _set_mode(self, mode: _Mode) -> None:
        with self._condition:
            if self._mode is not _Mode.STOP:
                self._mode = mode
            self._condition.notify()

    def _run(self) -> None:
        try:
            while (commands := self._next_commands()) is not None:
                self._turn(commands)
        except Exception as error:  # noqa: BLE001 - the thread's edge; reported, then it ends
            self.stop()
            self._on_failure(error)
        finally:
            self._busy = False

    def _next_commands(self) -> list[_Add | _Abort] | None:
        """All commands that have come, waiting for one where there is no work; None at the end."""
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

    def _turn(self, commands: list[_Add | _Abort]) -> None:
        for command in commands:
            self._obey(command)
        if self._engine.has_work:
            begun = self._clock()
            outputs = self.profiler.step(self._engine.step)
            self._last_step_at = self._clock()
            self._on_step(outputs, self._engine.stats(), self._last_step_at - begun)
        elif any(isinstance(command, _Abort) for command in commands):
            self._on_step([], self._engine.stats(), None)

    def _obey(self, command: _Add | _Abort) -> None:
        if isinstance(command, _Abort):
            self._engine.abort(command.request_id, command.choice)
            return
        try:
            self._engine.add_request(command.request)
        except RequestError as error:
            self._on_rejected(command.request.request_id, error)
