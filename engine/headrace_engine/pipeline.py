"""Steps one ahead of each other: while the device runs a step, the next one is planned and staged.

At most two steps are in flight. Where the next step depends on what the one in flight finds (see
lookahead), it is waited for first; so tokens are those of an engine that waits for every step.
"""

from collections import deque
from collections.abc import Callable

from .outputs import SequenceOutput
from .plan import PendingStep, StepPlan, StepResult
from .scheduler import Scheduler

Submit = Callable[[StepPlan], PendingStep]


class StepPipeline:
    """`submit` begins a step behind those that were submitted before, and does not wait for it."""

    def __init__(self, scheduler: Scheduler, submit: Submit) -> None:
        self._scheduler = scheduler
        self._submit = submit
        self._flight: deque[tuple[StepPlan, PendingStep]] = deque()
        # Whether the step in flight is booked, so that the next one may be planned over it.
        self._booked = False

    @property
    def busy(self) -> bool:
        """Whether a step is in flight, be it for choices that are gone."""
        return bool(self._flight)

    def step(self) -> list[SequenceOutput]:
        """Waits for the oldest step in flight, with the next one behind it; what it found."""
        outputs: list[SequenceOutput] = []
        if not self._flight:
            outputs += self._launch(ahead=False)
            if not self._flight:
                assert not self._scheduler.has_work, "sequences wait, but none can be scheduled"
                return outputs
            self._book()
        if self._booked:
            outputs += self._launch(ahead=True)
        plan, pending = self._flight.popleft()
        outputs += self._scheduler.update(plan, self._result(pending))
        if self._flight:
            self._book()
        return outputs

    def _launch(self, *, ahead: bool) -> list[SequenceOutput]:
        """Plans and submits a step, if there is something to do; the ends that planning made."""
        plan = self._scheduler.plan(ahead=ahead)
        if plan is not None:
            self._flight.append((plan, self._submit(plan)))
        return self._scheduler.take_shed()

    def _book(self) -> None:
        plan, _ = self._flight[0]
        self._booked = self._scheduler.advance(plan)

    def _result(self, pending: PendingStep) -> StepResult:
        try:
            return pending.result()
        except BaseException:
            # What was planned on top of a step that broke off means nothing.
            self._flight.clear()
            raise
