"""Compares a ModelService's canary with its stable engines, and writes its share of the requests to
the queue, where gateways read it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from headrace_common.errors import BackendUnavailable, BackendUnfit
from headrace_common.protocol.base import CanaryPlan
from headrace_common.protocol.variants import Agreement

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

_ADVICE = (
    "copy its image and revision to engine.image and model.hub.revision, and remove spec.canary"
)
NO_ROOM = "Unschedulable"  # says nothing about the canary


class CanaryShares(Protocol):
    """What is meant for canaries, in the queue. Raises BackendUnavailable."""

    async def set_plan(self, model: str, plan: CanaryPlan | None) -> None: ...

    async def agreement(self, model: str) -> Agreement: ...


class EnginePages(Protocol):
    """Reads the metrics of engines."""

    async def pages(self, model: str, pods: Sequence[PodAddress]) -> Mapping[str, Samples]: ...


@dataclass(frozen=True, slots=True)
class CanaryTrial:
    """A canary and what is known of it. One that was rolled back has no engines. Of one that was
    promoted, the stable engines run its image and revision; once all of them do, it is `replaced`
    and has no engines either."""

    image: str | None
    revision: str | None
    rolled_back: bool
    reason: str
    message: str
    promoted: bool = False
    replaced: bool = False

    @property
    def stopped(self) -> bool:
        return self.rolled_back or self.replaced

    @property
    def status(self) -> Manifest:
        """The trial in the API's form."""
        return {
            "rolledBack": self.rolled_back,
            "promoted": self.promoted,
            "reason": self.reason,
            "message": self.message,
            "image": self.image,
            "revision": self.revision,
        }


@dataclass(slots=True)
class _Counts:
    """What both sides have served since this canary was first seen."""

    of: tuple[str | None, str | None]
    stable: SideCounts = field(default_factory=SideCounts)
    canary: SideCounts = field(default_factory=SideCounts)
    before: Agreement | None = None  # the queue's counts then; None: not read yet
    agreement: Agreement = Agreement()
    good_since: float | None = None  # Unix seconds; None while it is not as good as the stable ones


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
        self,
        service: ModelService,
        pods: Sequence[Manifest],
        previous: Mapping[str, Any],
        now: float,
        *,
        rolled_out: bool,
    ) -> CanaryTrial | None:
        """The state of the canary; None if there is none.

        `previous` is the last status. `rolled_out`: all stable engines are as they were wanted at
        that time.
        """
        canary = service.spec.canary
        if canary is None:
            self.forget(service.key)
            return None
        if (ended := _ended(canary, previous.get("canary"))) is not None:
            return replace(ended, replaced=ended.promoted and rolled_out)
        own = engine_pods.of_track(pods, names.CANARY)
        problem = pod_problems.problem(own)
        if problem is not None and problem[0] != NO_ROOM:
            text = f"{problem[0]}: {problem[1]}"
            verdict = CanaryVerdict(CanaryReason.BROKEN, text, worse=True)
        else:
            verdict = await self._compare(service, canary, pods)
        if self._may_promote(service, canary, verdict, now):
            text = f"{verdict.message}; it was promoted: {_ADVICE}"
            reason = CanaryReason.PROMOTED.value
            return CanaryTrial(canary.image, canary.revision, False, reason, text, promoted=True)
        rolled_back = verdict.worse and canary.analysis.rollback
        text = f"{verdict.message}; it was rolled back" if rolled_back else verdict.message
        return CanaryTrial(canary.image, canary.revision, rolled_back, verdict.reason.value, text)

    def _may_promote(
        self, service: ModelService, canary: CanarySpec, verdict: CanaryVerdict, now: float
    ) -> bool:
        counts = self._counts.get(service.key)
        if counts is None:
            return False
        if verdict.reason is not CanaryReason.AS_GOOD:
            counts.good_since = None
            return False
        if counts.good_since is None:
            counts.good_since = now
        seconds = canary.auto_promotion_seconds
        return seconds is not None and now - counts.good_since >= seconds

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
        if analysis.min_agreement_percent is not None:
            await self._read_agreement(service, counts)
        limits = CanaryLimits(
            min_requests=analysis.min_requests,
            max_error_percent=analysis.max_error_percent,
            max_latency_ratio=analysis.max_latency_ratio,
            min_agreement_percent=analysis.min_agreement_percent,
            min_comparisons=analysis.min_comparisons,
        )
        return compare(counts.stable.total, counts.canary.total, limits, counts.agreement)

    async def _read_agreement(self, service: ModelService, counts: _Counts) -> None:
        """Reads it, best effort: without an answer the last counts stay."""
        try:
            found = await self._shares.agreement(service.served_name)
        except (BackendUnavailable, BackendUnfit) as error:
            extra = {"model_service": service.name, "error": str(error)}
            logger.warning("agreement of a canary's answers not read", extra=extra)
            return
        if counts.before is None:
            counts.before = found
        counts.agreement = found.since(counts.before)

    async def remove(self, model: str) -> None:
        """Removes the share of a ModelService that is gone. Raises BackendUnavailable."""
        await self._shares.set_plan(model, None)

    async def share(self, service: ModelService, trial: CanaryTrial | None) -> None:
        """Writes the share, best effort: the next reconciliation does it again."""
        canary = service.spec.canary
        runs = canary is not None and trial is not None and not trial.stopped
        plan = _plan(canary) if canary is not None and runs else None
        try:
            await self._shares.set_plan(service.served_name, plan)
        except (BackendUnavailable, BackendUnfit) as error:
            extra = {"model_service": service.name, "error": str(error)}
            logger.warning("share of a canary not written to the queue", extra=extra)


def _plan(canary: CanarySpec) -> CanaryPlan:
    analysis = canary.analysis
    compares = analysis.min_agreement_percent is not None
    return CanaryPlan(
        percent=canary.traffic_percent,
        comparisons_per_minute=analysis.comparisons_per_minute if compares else 0,
    )


def _ended(canary: CanarySpec, raw: Mapping[str, Any] | None) -> CanaryTrial | None:
    """The trial of this canary, if it was promoted or rolled back before and still is."""
    if raw is None or (raw.get("image"), raw.get("revision")) != (canary.image, canary.revision):
        return None
    promoted = bool(raw.get("promoted"))
    rolled_back = bool(raw.get("rolledBack")) and canary.analysis.rollback
    if not promoted and not rolled_back:
        return None
    reason, message = raw["reason"], raw["message"]
    return CanaryTrial(canary.image, canary.revision, rolled_back, reason, message, promoted)
