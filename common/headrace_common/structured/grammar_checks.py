"""Checks in killable processes that the grammar of a structured output can be compiled.

Gateways use it to refuse requests that no engine could run; engines use it too, since they do not
rely on gateways.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from ..pools.fair_slots import FairSlots, SlotsFull
from ..pools.limited_pool import KillReason, LimitedPool, TaskKilled, TaskLimits
from .grammars import GrammarChecker
from .refused_grammars import RefusedGrammar, RefusedGrammars
from .structured import StructuredKind, StructuredOutputError, StructuredOutputsParams

# The number of recently accepted grammars that are remembered.
KEPT = 1024
MOST_WAITING = 256
MOST_WAITING_OF_TENANT = 32
MAX_WAIT_S = 3.0
# Modules of the tasks.
PRELOAD = (
    "llguidance",
    "headrace_common.structured.grammars",
    "headrace_common.structured.structural_tag",
)


# Keywords of JSON schemas that multiply with each other, the costliest first.
_COSTLY = (
    *("allOf", "anyOf", "oneOf", "not", "pattern", "patternProperties", "multipleOf"),
    *("maxLength", "minLength", "maxItems", "minItems", "maximum", "minimum", "$ref"),
)
# Messages by whether the tenant itself keeps the processes busy.
_BUSY = {
    True: "too many of your schemas and grammars are being compiled",
    False: "too many schemas and grammars are being compiled",
}


class CheckResult(StrEnum):
    """How a check ended, for metrics."""

    GOOD = "good"
    INVALID = "invalid"
    TOO_EXPENSIVE = "too_expensive"
    REMEMBERED = "remembered"  # too expensive before, not tried again
    BUSY = "busy"


class GrammarsBusy(Exception):
    """The check cannot be made now. `tenant`: this tenant's own checks keep the pool busy."""

    def __init__(self, message: str, *, tenant: bool) -> None:
        super().__init__(message)
        self.tenant = tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckBounds:
    """The bounds of checks: `workers` processes with `limits` each; `max_wait` seconds of waiting.

    None: the caller bounds the wait itself.
    """

    workers: int = 2
    limits: TaskLimits = TaskLimits()
    max_wait: float | None = MAX_WAIT_S
    most_waiting: int | None = MOST_WAITING
    most_waiting_of_tenant: int | None = MOST_WAITING_OF_TENANT


class GrammarChecks:
    """Checks grammars. Use it on one event loop. `counted` is called with each check's result."""

    def __init__(
        self,
        bounds: CheckBounds,
        refused: RefusedGrammars,
        counted: Callable[[CheckResult], None] = lambda _: None,
    ) -> None:
        self._bounds = bounds
        self._refused = refused
        self._counted = counted
        self._pool = LimitedPool(bounds.workers, bounds.limits, [__name__, *PRELOAD])
        self._slots = FairSlots(
            bounds.workers,
            most=bounds.most_waiting,
            most_of_tenant=bounds.most_waiting_of_tenant,
        )
        self._good: OrderedDict[str, None] = OrderedDict()
        self._jobs: dict[tuple[str, str], _Job] = {}

    def known(self, structured: StructuredOutputsParams) -> bool:
        """Whether the grammar was recently accepted."""
        return self._is_good(self._digest(structured))

    async def check(self, structured: StructuredOutputsParams, tenant: str) -> None:
        """Checks a grammar. Raises StructuredOutputError or GrammarsBusy.

        Cancelling ends the check unless others wait for it.
        """
        digest = self._digest(structured)
        if self._is_good(digest):
            return
        job = self._jobs.get((tenant, digest))
        if job is None or job.task.cancelling():
            job = self._begin(structured, tenant, digest)
        error = await job.result()
        if error is not None:
            raise error

    async def close(self) -> None:
        for job in list(self._jobs.values()):
            job.task.cancel()
        await self._pool.close()

    def _begin(self, structured: StructuredOutputsParams, tenant: str, digest: str) -> "_Job":
        """Starts a check, which equal grammars of the tenant join."""
        task = asyncio.create_task(self._decide(structured, tenant, digest))
        job = self._jobs[tenant, digest] = _Job(task)
        task.add_done_callback(lambda _: self._end(job, tenant, digest))
        return job

    def _end(self, job: "_Job", tenant: str, digest: str) -> None:
        if self._jobs.get((tenant, digest)) is job:  # not the job that followed a cancelled one
            del self._jobs[tenant, digest]

    async def _decide(
        self, structured: StructuredOutputsParams, tenant: str, digest: str
    ) -> Exception | None:
        refused = await self._refused.find(digest)
        if refused is not None and refused.final:
            self._counted(CheckResult.REMEMBERED)
            return self._too_expensive(structured, refused)
        try:
            async with self._slots.hold(tenant, self._bounds.max_wait):
                fault = await self._pool.run(fault_of, structured)
        except SlotsFull as full:
            self._counted(CheckResult.BUSY)
            return GrammarsBusy(_BUSY[full.tenant], tenant=full.tenant)
        except TaskKilled as killed:
            attempts = 1 if refused is None else refused.attempts + 1
            return await self._note(structured, digest, RefusedGrammar(killed.reason, attempts))
        if fault is not None:
            self._counted(CheckResult.INVALID)
            return StructuredOutputError(*fault)
        self._counted(CheckResult.GOOD)
        self._keep(digest)
        return None

    async def _note(
        self, structured: StructuredOutputsParams, digest: str, refused: RefusedGrammar
    ) -> Exception:
        """Remembers the limit for which the check's process was ended."""
        await self._refused.add(digest, refused)
        if refused.reason is KillReason.TIMEOUT and not refused.final:
            self._counted(CheckResult.BUSY)
            return GrammarsBusy(f"took over {self._limits.timeout:g} s to compile", tenant=False)
        self._counted(CheckResult.TOO_EXPENSIVE)
        return self._too_expensive(structured, refused)

    def _too_expensive(
        self, structured: StructuredOutputsParams, refused: RefusedGrammar
    ) -> StructuredOutputError:
        match refused.reason:
            case KillReason.TIMEOUT:
                reason = f"takes over {self._limits.timeout:g} s to compile"
            case KillReason.CPU:
                reason = f"takes over {self._limits.cpu_seconds} s of CPU time to compile"
            case KillReason.MEMORY:
                reason = f"takes over {self._limits.memory_bytes >> 20} MiB to compile"
            case KillReason.DIED:
                reason = "ended the process that compiled it"
        return StructuredOutputError(structured.kind, f"{reason}: {advice(structured)}")

    def _is_good(self, digest: str) -> bool:
        if digest not in self._good:
            return False
        self._good.move_to_end(digest)
        return True

    def _keep(self, digest: str) -> None:
        self._good[digest] = None
        while len(self._good) > KEPT:
            self._good.popitem(last=False)

    def _digest(self, structured: StructuredOutputsParams) -> str:
        """The digest of the grammar and the limits. It does not depend on the tenant."""
        limits = [self._limits.cpu_seconds, self._limits.memory_bytes]
        text = json.dumps([structured.to_wire(), limits])
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def _limits(self) -> TaskLimits:
        return self._bounds.limits


class _Job:
    """One check, and how many wait for it."""

    def __init__(self, task: asyncio.Task[Exception | None]) -> None:
        self.task = task
        self._waiting = 0

    async def result(self) -> Exception | None:
        """The check's error or None. Cancelling ends the check unless others wait for it."""
        self._waiting += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self.task.cancel()


def fault_of(structured: StructuredOutputsParams) -> tuple[str, str] | None:
    """The invalid field and its problem; None if the grammar compiles. Runs in the pool."""
    try:
        GrammarChecker().check(structured)
    except StructuredOutputError as error:
        return error.field, error.message
    return None


def advice(structured: StructuredOutputsParams) -> str:
    """The change that makes a grammar less expensive."""
    source = structured.source
    match structured.kind:
        case StructuredKind.REGEX:
            return "have fewer alternatives, or shorter repetitions as {1,20}"
        case StructuredKind.GRAMMAR:
            return "have fewer or shorter terminals (names in capitals), or make rules of them"
        case StructuredKind.CHOICE:
            return "have fewer choices"
    found = [keyword for keyword in _COSTLY if f'"{keyword}"' in source]
    return f"have less of {', '.join(found)}" if found else "make it smaller"
