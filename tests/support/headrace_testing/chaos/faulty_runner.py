"""The engine's real model runner with faults on demand, inside a real engine process.

After the signal HANG the next step never ends. After RAISE, a step raises some steps later. A
prompt with the token POISON kills the process, as a crashing kernel would; a Fate may do so too.
Each step takes at least STEP_S, so that faults hit streams while they run; waiting costs no CPU.
"""

import os
import signal
import threading
import time
from functools import partial
from types import FrameType

import headrace_engine.__main__ as program
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.start_phases import OnPhase, ignore_phase
from headrace_engine.core.step_plan import SchedulerOutput, StepResult
from headrace_engine.model_runner.model_runner import ModelRunner

from .demands import HANG, POISON, RAISE, Moment
from .fate import Fate

STEP_S = 0.004
STEPS_UNTIL_RAISE = 10


class FaultyForwardError(RuntimeError):
    """Represents any error that a forward pass may raise."""


class FaultyRunner(ModelRunner):
    """A runner with faults.

    Must be made in the main thread, which alone may set signal handlers.
    """

    def __init__(self, fate: Fate, config: EngineConfig, on_phase: OnPhase = ignore_phase) -> None:
        super().__init__(config, on_phase=on_phase)
        self._fate = fate
        self._hangs = False
        self._left: int | None = None
        signal.signal(HANG, self._hang)
        signal.signal(RAISE, self._raise_later)

    def _hang(self, _number: int, _frame: FrameType | None) -> None:
        self._hangs = True

    def _raise_later(self, _number: int, _frame: FrameType | None) -> None:
        self._left = STEPS_UNTIL_RAISE

    def execute(self, scheduler_output: SchedulerOutput) -> StepResult:
        begun = time.monotonic()
        if any(
            POISON in item.sequence.request.prompt_token_ids for item in scheduler_output.scheduled
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._hangs:
            threading.Event().wait()
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise FaultyForwardError("a forward pass failed")
        result = super().execute(scheduler_output)
        self._fate.meet(Moment.PREFILL if scheduler_output.prefill_tokens else Moment.DECODE)
        time.sleep(max(0.0, STEP_S - (time.monotonic() - begun)))
        return result


def install(fate: Fate) -> None:
    """Makes the engine program of this process use this runner."""
    assert vars(program)["ModelRunner"] is ModelRunner
    vars(program)["ModelRunner"] = partial(FaultyRunner, fate)
