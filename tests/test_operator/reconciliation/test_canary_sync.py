"""When a canary is promoted by itself, and what is remembered of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from headrace_common.protocol.base import CanaryPlan
from headrace_common.protocol.variants import Agreement
from headrace_operator.reconciliation.canary_sync import CanarySync, CanaryTrial
from headrace_operator.signals.signals import PodAddress, Samples
from headrace_testing.kubernetes import pod
from headrace_testing.model_services import service

PODS = [pod("old", "qwen"), pod("new", "qwen", track="canary")]
SECONDS = 300
CANARY = {"image": "engine:2", "autoPromotionSeconds": SECONDS}


class Fleet:
    """One stable engine and one canary, with the same number of ended requests."""

    def __init__(self) -> None:
        self.ended, self.failed_by_canary = 0, 0
        self.plan: CanaryPlan | None = CanaryPlan()

    async def set_plan(self, model: str, plan: CanaryPlan | None) -> None:
        self.plan = plan

    async def agreement(self, model: str) -> Agreement:
        return Agreement()

    async def pages(self, model: str, pods: Sequence[PodAddress]) -> Mapping[str, Samples]:
        return {each.pod: self._page(each.pod) for each in pods}

    def _page(self, name: str) -> Samples:
        failed = self.failed_by_canary if name == "new" else 0
        return {
            "headrace_engine_requests_ended_total": [
                ({"error_type": ""}, self.ended - failed),
                ({"error_type": "internal_error"}, failed),
            ]
        }


class Operator:
    """Judges the canary of one ModelService again and again, and keeps its status."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.sync = CanarySync(fleet, fleet)
        self.status: dict[str, Any] = {}

    async def judge(self, now: float, *, rolled_out: bool = True, **canary: Any) -> CanaryTrial:
        wanted = service(canary={**CANARY, **canary})
        trial = await self.sync.judge(wanted, PODS, self.status, now, rolled_out=rolled_out)
        assert trial is not None
        await self.sync.share(wanted, trial)
        self.status = {"canary": trial.status}
        return trial


@pytest.fixture
async def operator() -> Operator:
    """It has seen the canary, and that it is as good as the stable engine since 1000 s."""
    made = Operator(Fleet())
    assert (await made.judge(0.0)).reason == "Comparing"
    made.fleet.ended = 100
    assert (await made.judge(1000.0)).reason == "AsGoodAsStable"
    return made


async def test_a_canary_is_promoted_after_its_time(operator: Operator) -> None:
    assert not (await operator.judge(1000 + SECONDS - 1)).promoted
    trial = await operator.judge(1000 + SECONDS)

    assert (trial.promoted, trial.reason) == (True, "CanaryPromoted")
    assert "engine.image" in trial.message
    assert operator.fleet.plan == CanaryPlan(10), "until the stable engines have followed"


async def test_its_time_begins_again_after_a_failure(operator: Operator) -> None:
    keeps: dict[str, Any] = {"analysis": {"rollback": False}}
    operator.fleet.failed_by_canary = 50
    assert (await operator.judge(1200.0, **keeps)).reason == "CanaryFailsRequests"
    operator.fleet.ended = 10_000
    assert (await operator.judge(1250.0, **keeps)).reason == "AsGoodAsStable"

    assert not (await operator.judge(1250 + SECONDS - 1, **keeps)).promoted
    assert (await operator.judge(1250 + SECONDS, **keeps)).promoted


async def test_without_the_field_none_is_promoted(operator: Operator) -> None:
    trial = await operator.judge(1e9, autoPromotionSeconds=None)

    assert (trial.promoted, trial.reason) == (False, "AsGoodAsStable")


async def test_a_canary_is_replaced_once_the_stable_engines_have_followed(
    operator: Operator,
) -> None:
    trial = await operator.judge(1000 + SECONDS, rolled_out=True)
    assert not trial.replaced, "what was rolled out then is the old version"
    trial = await operator.judge(1001 + SECONDS, rolled_out=False)
    assert (trial.promoted, trial.stopped, operator.fleet.plan) == (True, False, CanaryPlan(10))
    trial = await operator.judge(1002 + SECONDS, rolled_out=True)
    assert (trial.stopped, operator.fleet.plan) == (True, None)


async def test_a_promotion_is_remembered_until_there_is_another_canary(operator: Operator) -> None:
    await operator.judge(1000 + SECONDS)
    operator.sync = CanarySync(operator.fleet, operator.fleet)  # another process
    assert (await operator.judge(2000.0, autoPromotionSeconds=None)).promoted

    trial = await operator.judge(2001.0, image="engine:3")
    assert (trial.promoted, trial.reason) == (False, "Comparing")


def test_the_promoted_service_has_the_canarys_image_and_revision() -> None:
    found = service(canary={"image": "engine:2", "revision": "def456"}).promoted

    assert found.spec.engine.image == "engine:2"
    assert found.spec.model.hub is not None and found.spec.model.hub.revision == "def456"
    one = service(engine={"image": "engine:1"}, canary={"revision": "def456"}).promoted
    assert one.spec.engine.image == "engine:1"
