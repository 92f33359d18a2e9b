"""Asynchronous scheduling: while the device runs a step, the next one is scheduled and submitted.

At most two steps are in flight. If the next step depends on the result of the one in flight (see
async_scheduling), it waits for that one first. So the tokens are the same as with synchronous
steps.
"""

from collections import deque
from collections.abc import Callable

from ..core.outputs import SequenceOutput
from ..core.step_plan import PendingStep, SchedulerOutput, StepResult
from ..scheduler.scheduler import Scheduler

Submit = Callable[[SchedulerOutput], PendingStep]


class StepPipeline:
    """Keeps up to two steps in flight. `submit` starts a step without waiting for its result."""

    def __init__(self, scheduler: Scheduler, submit: Submit) -> None:
        self._scheduler = scheduler
        self._submit = submit
        self._flight: deque[tuple[SchedulerOutput, PendingStep]] = deque()
        # Whether the next step can be scheduled before the result of the one in flight is known.
        self._advanced = False

    @property
    def busy(self) -> bool:
        """Whether a step is in flight, even if all its choices have ended."""
        return bool(self._flight)

    def step(self) -> list[SequenceOutput]:
        """Submits the next step, then waits for the oldest one and returns its outputs."""
        outputs: list[SequenceOutput] = []
        if not self._flight:
            outputs += self._launch(ahead=False)
            if not self._flight:
                self._scheduler.wait_for_work()
                return outputs
            self._advance()
        if self._advanced:
            outputs += self._launch(ahead=True)
        scheduler_output, pending = self._flight.popleft()
        outputs += self._scheduler.update(scheduler_output, self._result(pending))
        if self._flight:
            self._advance()
        return outputs

    def _launch(self, *, ahead: bool) -> list[SequenceOutput]:
        """Schedules and submits a step, if there is one; returns outputs that the policy ended."""
        scheduler_output = self._scheduler.schedule(ahead=ahead)
        if scheduler_output is not None:
            self._flight.append((scheduler_output, self._submit(scheduler_output)))
        return self._scheduler.take_aborted_by_policy()

    def _advance(self) -> None:
        scheduler_output, _ = self._flight[0]
        self._advanced = self._scheduler.advance(scheduler_output)

    def _result(self, pending: PendingStep) -> StepResult:
        try:
            return pending.result()
        except BaseException:
            # The steps submitted after a failed one are void.
            self._flight.clear()
            raise
