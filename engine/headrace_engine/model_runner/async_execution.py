"""Executes submitted steps in order, without waiting for their results.

On a GPU a step is launched at once and the device's stream keeps the order. On a CPU a thread
executes the steps.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from ..core.outputs import SampledToken, TokenLogprobs
from ..core.step_plan import PendingStep, SampleRow, SchedulerOutput, StepResult
from ..device.timing import Times, begin_times
from ..sampling.sampler_output import SamplerOutput
from ..speculative.acceptance import group_by_sequence
from .future_tokens import FutureTokens
from .input_batch import StepBatch

Mark = Callable[[], None]


@dataclass(slots=True, eq=False)
class Step:
    """A step with its inputs and its results. Used by one thread at a time.

    `before` is the step in flight while this one was scheduled. The tokens that it samples in the
    batch's rows `sources` belong in the `places` of this step's input: see `future_tokens`.
    """

    scheduler_output: SchedulerOutput
    batch: StepBatch
    future_tokens: FutureTokens | None = None
    before: "Step | None" = None
    sampled: SamplerOutput | None = None
    scored: tuple[tuple[TokenLogprobs, ...], ...] = ()
    embeddings: tuple[bytes | None, ...] = ()
    swapping: Times | None = None
    saving: Times | None = None
    encoding: Times | None = None
    # Waits until the sampled tokens are on the host.
    arrive: Mark | None = None
    _host: SamplerOutput | None = None
    _tokens: tuple[SampledToken | None, ...] | None = None

    def take_inputs(self) -> None:
        """Copies the tokens that the step before sampled into this step's input, on the device."""
        batch = self.batch
        if self.before is None or batch.places is None or batch.sources is None:
            return
        assert self.before.sampled is not None, "steps run in the order of their submission"
        tokens = self.before.sampled.tokens.index_select(0, batch.sources)
        batch.forward.input_ids.index_copy_(0, batch.places, tokens)

    def rows(self) -> tuple[SampleRow, ...]:
        """The rows of logits to sample.

        Waits for the step before only if a row's penalties or grammar need its tokens. Drops the
        reference to it, so that finished steps are freed.
        """
        future_tokens, before = self.future_tokens, self.before
        self.before = None
        if future_tokens is None:
            return self.batch.sampling
        if before is None or not future_tokens.needs_ids:
            return future_tokens.sampling
        return future_tokens.resolve(before.tokens())

    def send(self) -> None:
        """Starts to copy the sampled tokens to the host."""
        if self.sampled is not None:
            self._host = self.sampled.to_host()

    def wait(self) -> None:
        """Waits until the sampled tokens are on the host."""
        arrive, self.arrive = self.arrive, None
        if arrive is not None:
            arrive()

    def tokens(self) -> tuple[SampledToken | None, ...]:
        """Waits for the sampled tokens and returns them, row by row."""
        if self._tokens is None:
            self.wait()
            host = self._host or self.sampled
            self._tokens = () if host is None else host.read()
        return self._tokens

    def result(self, seconds: float) -> StepResult:
        """Waits for the step and returns its result for the scheduler."""
        drafts = [item.drafts for item in self.scheduler_output.scheduled if item.samples]
        tokens = self.tokens()
        if self.saving is not None:
            self.saving.wait()
        return StepResult(
            group_by_sequence(drafts, tokens) if tokens else (),
            self.embeddings,
            seconds,
            _seconds(self.swapping),
            self.scored,
            _seconds(self.encoding),
        )


def _seconds(times: Times | None) -> float:
    """The measured time, once the device has finished that work."""
    if times is None:
        return 0.0
    times.wait()
    return times.seconds()


Launch = Callable[[Step], None]


class StepExecutor(Protocol):
    """Executes steps in the order of their submission."""

    def submit(self, step: Step, launch: Launch) -> PendingStep:
        """Executes a step; `launch` gives the device all work of the step."""


class ThreadExecutor:
    """Executes steps in its own thread, which ends with the object. `clock` counts seconds."""

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


class StreamExecutor:
    """Launches steps in the caller's thread, without waiting for the device.

    `clock` counts seconds, for devices without timers of their own.
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


def make_executor(device: torch.device, clock: Callable[[], float]) -> StepExecutor:
    """The executor for a device: a stream on GPUs, a thread on CPUs."""
    return StreamExecutor(device) if device.type == "cuda" else ThreadExecutor(clock)


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    step: Step
    times: Times

    def result(self) -> StepResult:
        self.step.wait()
        return self.step.result(self.times.seconds())
