"""Three kinds of batching: when the scheduler gets requests, and what a step then costs."""

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Protocol

from headrace_engine.core.step_plan import ScheduledSequence, SchedulerOutput
from headrace_operator.simulation.engine import EngineCosts

from .jobs import Job


@dataclass(frozen=True, slots=True)
class StepCost:
    """The seconds of a step, the token slots that it computed, and the output slots among them."""

    seconds: float
    slots: int
    output_slots: int


class Batching(Protocol):
    def admit(self, queue: deque[Job], now: float, idle: bool, more: bool) -> list[Job]:
        """Moves jobs from the queue to the scheduler. `more` says whether others will arrive."""

    def wake(self, queue: deque[Job]) -> float:
        """The time at which to ask again even if nothing arrives."""

    def cost(self, scheduler_output: SchedulerOutput, costs: EngineCosts) -> StepCost: ...

    def reserved(self, used: int) -> int:
        """The KV slots that are reserved; the scheduler's blocks use `used` of them."""


class Continuous:
    """Iteration-level scheduling: requests enter and leave after every step; nothing is padded."""

    def admit(self, queue: deque[Job], now: float, idle: bool, more: bool) -> list[Job]:
        taken = list(queue)
        queue.clear()
        return taken

    def wake(self, queue: deque[Job]) -> float:
        return inf

    def cost(self, scheduler_output: SchedulerOutput, costs: EngineCosts) -> StepCost:
        prefill = sum(item.length for item in scheduler_output.scheduled if is_prefill(item))
        decodes = scheduler_output.num_tokens - prefill
        samples = sum(item.samples for item in scheduler_output.scheduled)
        return StepCost(costs.step(decodes, prefill), scheduler_output.num_tokens, samples)

    def reserved(self, used: int) -> int:
        return used


class Batched:
    """A batch runs until its last sequence ends; then the next one is formed.

    Static batching waits for `size` requests; dynamic batching at most `wait` seconds from the
    first one on. Prompts are padded to the longest, ended sequences keep their slots, and each
    slot's KV is reserved for the longest prompt and the most output of its batch.
    """

    def __init__(self, size: int, wait: float = inf) -> None:
        self._size = size
        self._wait = wait
        self._batch: list[Job] = []

    def admit(self, queue: deque[Job], now: float, idle: bool, more: bool) -> list[Job]:
        due = bool(queue) and (len(queue) >= self._size or not more or now >= self.wake(queue))
        if not idle or not due:
            return []
        self._batch = [queue.popleft() for _ in range(min(self._size, len(queue)))]
        return self._batch

    def wake(self, queue: deque[Job]) -> float:
        return queue[0].arrival + self._wait if queue else inf

    def cost(self, scheduler_output: SchedulerOutput, costs: EngineCosts) -> StepCost:
        size = len(self._batch)
        if not is_prefill(scheduler_output.scheduled[0]):
            return StepCost(costs.step(size, 0), size, size)
        slots = size * max(len(job.prompt) for job in self._batch)
        return StepCost(costs.step(0, slots), slots, size)

    def reserved(self, used: int) -> int:
        prompt = max(len(job.prompt) for job in self._batch)
        return len(self._batch) * (prompt + max(job.max_tokens for job in self._batch))


def is_prefill(item: ScheduledSequence) -> bool:
    return item.start < item.sequence.prompt_length or item.length > 1
