"""Steps that are carried out behind each other while nobody waits for them.

On a GPU a step is launched at once and the device's stream keeps the order. A CPU gets a thread
that carries steps out, in the place of a device.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from .batch import StepBatch
from .chaining import Links
from .outputs import SampledToken, TokenLogprobs
from .plan import PendingStep, SampleRow, StepPlan, StepResult
from .sampled import SampledRows
from .speculation.acceptance import group
from .timing import Times, begin_times

Mark = Callable[[], None]


@dataclass(slots=True, eq=False)
class Step:
    """A step with its inputs, and what it computes. Used by one thread at a time.

    `links` tie it to the step `before`, over which it was planned: the tokens that this one chose
    in rows `sources` of the batch's links belong in `places` of its input.
    """

    plan: StepPlan
    batch: StepBatch
    links: Links | None = None
    before: "Step | None" = None
    sampled: SampledRows | None = None
    scored: tuple[tuple[TokenLogprobs, ...], ...] = ()
    embeddings: tuple[bytes | None, ...] = ()
    swapping: Times | None = None
    # Waits until what was sampled is on the host.
    arrive: Mark | None = None
    _host: SampledRows | None = None
    _tokens: tuple[SampledToken | None, ...] | None = None

    def take_inputs(self) -> None:
        """Puts the tokens that the step before chose where this one reads them, on the device."""
        batch = self.batch
        if self.before is None or batch.places is None or batch.sources is None:
            return
        assert self.before.sampled is not None, "steps run in the order of their submission"
        tokens = self.before.sampled.tokens.index_select(0, batch.sources)
        batch.forward.input_ids.index_copy_(0, batch.places, tokens)

    def rows(self) -> tuple[SampleRow, ...]:
        """The rows of logits to sample. Waits for the step before only where one of them is sampled
        with a look at its tokens; forgets it, as a step holds the next one only."""
        links, before = self.links, self.before
        self.before = None
        if links is None:
            return self.batch.sampling
        if before is None or not links.needs_ids:
            return links.sampling
        return links.resolve(before.tokens())

    def send(self) -> None:
        """Begins to copy what was sampled to the host."""
        if self.sampled is not None:
            self._host = self.sampled.to_host()

    def wait(self) -> None:
        """Until what was sampled is on the host."""
        arrive, self.arrive = self.arrive, None
        if arrive is not None:
            arrive()

    def tokens(self) -> tuple[SampledToken | None, ...]:
        """What was sampled, row by row; waits for it."""
        if self._tokens is None:
            self.wait()
            host = self._host or self.sampled
            self._tokens = () if host is None else host.read()
        return self._tokens

    def result(self, seconds: float) -> StepResult:
        """What the scheduler gets; waits for it."""
        drafts = [item.drafts for item in self.plan.scheduled if item.samples]
        tokens = self.tokens()
        return StepResult(
            group(drafts, tokens) if tokens else (),
            self.embeddings,
            seconds,
            self._swap_seconds(),
            self.scored,
        )

    def _swap_seconds(self) -> float:
        if self.swapping is None:
            return 0.0
        self.swapping.wait()
        return self.swapping.seconds()


Launch = Callable[[Step], None]


class Submission(Protocol):
    """Carries steps out in the order of their submission."""

    def submit(self, step: Step, launch: Launch) -> PendingStep:
        """`launch` gives the device all that it has to do for the step."""


class ThreadSubmission:
    """On one thread of its own, which ends with the object. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-step")

    def submit(self, step: Step, launch: Launch) -> PendingStep:
        return self._pool.submit(self._run, step, launch)

    def _run(self, step: Step, launch: Launch) -> StepResult:
        begun = self._clock()
        launch(step)
        step.tokens()
        return step.result(self._clock() - begun)


class StreamSubmission:
    """In the caller's thread, where `launch` does not wait for the device.

    `clock` counts seconds, for devices that keep no time themselves.
    """

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device = device
        self._clock = clock

    def submit(self, step: Step, launch: Launch) -> PendingStep:
        times = begin_times(self._device, self._clock)
        launch(step)
        step.send()
        times.end()
        step.arrive = times.wait
        return _LaunchedStep(step, times)


def make_submission(device: torch.device, clock: Callable[[], float]) -> Submission:
    """What suits a device."""
    return StreamSubmission(device) if device.type == "cuda" else ThreadSubmission(clock)


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    step: Step
    times: Times

    def result(self) -> StepResult:
        self.step.wait()
        return self.step.result(self.times.seconds())
