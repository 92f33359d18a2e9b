"""Compares a ModelService's canary with its stable engines, and writes its share of the requests to
the queue, where gateways read it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace_common.errors import BackendUnavailable, BackendUnfit

from .. import names
from ..scaling.canary import CanaryLimits, CanaryReason, CanaryVerdict, compare
from ..signals.canary_metrics import SideCounts, totals_of
from ..signals.signals import PodAddress, Samples
from ..spec.model_service import ModelService
from ..spec.sections import CanarySpec
from . import engine_pods, pod_problems

logger = logging.getLogger(__name__)

Manifest = dict[str, Any]
Key = tuple[str, str]

NO_ROOM = "Unschedulable"  # says nothing about the canary


class CanaryShares(Protocol):
    """The shares in the queue. Raises BackendUnavailable."""

    async def set_percent(self, model: str, percent: float | None) -> None: ...


class EnginePages(Protocol):
    """Reads the metrics of engines."""

    async def pages(self, model: str, pods: Sequence[PodAddress]) -> Mapping[str, Samples]: ...


@dataclass(frozen=True, slots=True)
class CanaryTrial:
    """A canary and what is known of it. One that was rolled back has no engines."""

    image: str | None
    revision: str | None
    rolled_back: bool
    reason: str
    message: str

    @property
    def status(self) -> Manifest:
        """The trial in the API's form."""
        found = {"rolledBack": self.rolled_back, "reason": self.reason, "message": self.message}
        return found | {"image": self.image, "revision": self.revision}


@dataclass(slots=True)
class _Counts:
    """What both sides have served since this canary was first seen."""

    of: tuple[str | None, str | None]
    stable: SideCounts = field(default_factory=SideCounts)
    canary: SideCounts = field(default_factory=SideCounts)


class CanarySync:
    """Judges canaries and keeps their shares. Those of models without a canary are removed.

    `engines` None: nothing is measured.
    """

    def __init__(self, shares: CanaryShares, engines: EnginePages | None = None) -> None:
        self._shares = shares
        self._engines = engines
        self._counts: dict[Key, _Counts] = {}

    def forget(self, key: Key) -> None:
        self._counts.pop(key, None)

    async def judge(
        self, service: ModelService, pods: Sequence[Manifest], previous: Mapping[str, Any]
    ) -> CanaryTrial | None:
        """The state of the canary; None if there is none. `previous` is the last status."""
        canary = service.spec.canary
        if canary is None:
            self.forget(service.key)
            return None
        if (ended := _rolled_back(canary, previous.get("canary"))) is not None:
            return ended
        own = engine_pods.of_track(pods, names.CANARY)
        problem = pod_problems.problem(own)
        if problem is not None and problem[0] != NO_ROOM:
            text = f"{problem[0]}: {problem[1]}"
            verdict = CanaryVerdict(CanaryReason.BROKEN, text, worse=True)
        else:
            verdict = await self._compare(service, canary, pods)
        rolled_back = verdict.worse and canary.analysis.rollback
        text = f"{verdict.message}; it was rolled back" if rolled_back else verdict.message
        return CanaryTrial(canary.image, canary.revision, rolled_back, verdict.reason.value, text)

    async def _compare(
        self, service: ModelService, canary: CanarySpec, pods: Sequence[Manifest]
    ) -> CanaryVerdict:
        of = (canary.image, canary.revision)
        counts = self._counts.get(service.key)
        if counts is None or counts.of != of:
            counts = self._counts[service.key] = _Counts(of)
        if self._engines is not None:
            for side, track in ((counts.stable, names.STABLE), (counts.canary, names.CANARY)):
                addresses = engine_pods.addresses(engine_pods.of_track(pods, track))
                pages = await self._engines.pages(service.served_name, addresses)
                side.add({pod: totals_of(page) for pod, page in pages.items()})
        analysis = canary.analysis
        limits = CanaryLimits(
            min_requests=analysis.min_requests,
            max_error_percent=analysis.max_error_percent,
            max_latency_ratio=analysis.max_latency_ratio,
        )
        return compare(counts.stable.total, counts.canary.total, limits)

    async def remove(self, model: str) -> None:
        """Removes the share of a ModelService that is gone. Raises BackendUnavailable."""
        await self._shares.set_percent(model, None)

    async def share(self, service: ModelService, trial: CanaryTrial | None) -> None:
        """Writes the share, best effort: the next reconciliation does it again."""
        canary = service.spec.canary
        runs = canary is not None and trial is not None and not trial.rolled_back
        percent = canary.traffic_percent if canary is not None and runs else None
        try:
            await self._shares.set_percent(service.served_name, percent)
        except (BackendUnavailable, BackendUnfit) as error:
            extra = {"model_service": service.name, "error": str(error)}
            logger.warning("share of a canary not written to the queue", extra=extra)


def _rolled_back(canary: CanarySpec, raw: Mapping[str, Any] | None) -> CanaryTrial | None:
    """The trial of this canary, if it was rolled back before and still may be."""
    if raw is None or not raw.get("rolledBack") or not canary.analysis.rollback:
        return None
    if (raw.get("image"), raw.get("revision")) != (canary.image, canary.revision):
        return None
    return CanaryTrial(canary.image, canary.revision, True, raw["reason"], raw["message"])
