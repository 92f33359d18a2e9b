"""The real operator decides as the simulator does, in an hour of a trace that is sixty times as
fast."""

import os
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from headrace_cluster.api import api
from headrace_cluster.fake_node import PLACEMENT, FakeNode
from headrace_cluster.release import Release, Service
from headrace_cluster.replay import ClusterScaler, SignalServer, faster, faster_engine
from headrace_cluster.simulated import decisions, operator_scaler, within_one
from headrace_cluster.specs import demo_service
from headrace_common.protocol.base import QueueLimits
from headrace_operator.simulation.engine_profile import load_profile
from headrace_operator.simulation.result import Objectives
from headrace_operator.simulation.run import Setup, simulate
from headrace_operator.simulation.workload import Diurnal, diurnal
from headrace_testing.processes import until

NAME = "replayed"
HOUR = 3600.0
FASTER = 60.0
START_S = 3.0
# A pod may be ready for the operator a moment after it is so for the simulator.
SHARE = 0.8
# The host's address for pods.
HOST = os.environ.get("CLUSTER_HOST", "10.244.0.1")
# The first of two hours with the rhythm of a day: it rises to the highest load, and has a burst.
LOAD = Diurnal(seconds=HOUR, day=2 * HOUR, bursts=1, burst=0.8)


def scaling(prometheus: str) -> dict[str, Any]:
    """The default policy, whose minutes of scaling down are seconds."""
    return {
        "mode": "operator",
        "minReplicas": 1,
        "maxReplicas": 16,
        "coldStartSeconds": round(START_S),
        "prometheusUrl": prometheus,
        "behavior": {
            "scaleDown": {
                "stabilizationWindowSeconds": 2,
                "policies": [
                    {"type": "Percent", "value": 25, "periodSeconds": 1},
                    {"type": "Pods", "value": 1, "periodSeconds": 1},
                ],
            }
        },
    }


@pytest.mark.parametrize("seed", [441, 442])
def test_the_operator_decides_through_an_hour_of_a_trace_as_the_simulator_does(
    release: Release, seed: int
) -> None:
    setup = Setup(
        trace=faster(diurnal(replace(LOAD, seed=seed)), FASTER),
        profile=faster_engine(load_profile(None), FASTER, START_S),
        objectives=Objectives(),
        limits=QueueLimits(),
        replicas=1,
    )
    service = Service(release, NAME)

    def count() -> int:
        """Without draining engines, which the Deployment's count includes."""
        return int(service.status.get("desiredReplicas", 0))

    scaler = ClusterScaler(count, setup.profile)
    with (
        SignalServer(NAME, lambda: replace(scaler.shown, replicas=count())) as signals,
        FakeNode(api=api(), name=f"fake-{release.namespace}", start_s=START_S),
    ):
        policy = scaling(f"http://{HOST}:{signals.port}")
        manifest = demo_service(NAME, scaling=policy)
        manifest["spec"]["engine"] |= PLACEMENT
        release.kubectl.apply(manifest)
        service.until_ready(1)
        # It begins with one of the operator's decisions, as a simulation does.
        known = len(signals.readings)
        until(lambda: len(signals.readings) > known, "the operator to read its signals")
        scaler.began, _ = signals.readings[-1]
        simulate(setup, scaler)
        service.delete()

    # Each reading shows the count that the operator decided after the one before it.
    rule = operator_scaler(policy)
    decided = [
        (seen_later.replicas, rule.replicas(replace(seen, at=at), at))
        for (at, seen), (_, seen_later) in pairwise(signals.readings)
    ][known:]
    same = sum(count == wanted for count, wanted in decided) / len(decided)
    most = max(count for count, _ in decided)
    in_time = within_one(scaler.counts, decisions(setup, policy))
    print(  # noqa: T201
        f"{same:.1%} of the decisions are the simulator's, and the count is within one of its "
        f"for {in_time:.1%} of the time; at most {most} engines"
    )
    assert most >= 5
    assert same >= SHARE, decided
