"""The real operator scales fake engines through an hour of a trace, sixty times as fast, as the
simulator does."""

import os
from typing import Any

from headrace_cluster.fake_node import PLACEMENT, FakeNode
from headrace_cluster.release import Release, Service
from headrace_cluster.replay import ClusterScaler, SignalServer, faster, faster_engine
from headrace_cluster.simulated import decisions, within_one
from headrace_cluster.specs import demo_service
from headrace_common.protocol.base import QueueLimits
from headrace_operator.simulation.engine_profile import load_profile
from headrace_operator.simulation.result import Objectives
from headrace_operator.simulation.run import Setup, simulate
from headrace_operator.simulation.workload import Diurnal, diurnal

NAME = "replayed"
HOUR = 3600.0
FASTER = 60.0
START_S = 3.0
SHARE = 0.95
# The host's address for pods.
HOST = os.environ.get("CLUSTER_HOST", "10.244.0.1")


def scaling(prometheus: str) -> dict[str, Any]:
    """The default policy, whose times of minutes are seconds."""
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


def test_the_operator_follows_an_hour_of_a_trace_as_the_simulator_does(release: Release) -> None:
    """An hour that rises to the peak of a day of two hours, with a burst."""
    hour = diurnal(Diurnal(seconds=HOUR, day=2 * HOUR, bursts=1, burst=0.8, seed=441))
    setup = Setup(
        trace=faster(hour, FASTER),
        profile=faster_engine(load_profile(None), FASTER, START_S),
        objectives=Objectives(),
        limits=QueueLimits(),
        replicas=1,
    )
    service = Service(release, NAME)

    def count() -> int:
        wanted = release.kubectl.get("deployment", service.deployment)["spec"]["replicas"]
        return int(wanted)

    scaler: ClusterScaler | None = None
    with (
        SignalServer(NAME, lambda: None if scaler is None else scaler.shown) as signals,
        FakeNode(f"fake-{release.namespace}", START_S),
    ):
        policy = scaling(f"http://{HOST}:{signals.port}")
        manifest = demo_service(NAME, scaling=policy)
        manifest["spec"]["engine"] |= PLACEMENT
        release.kubectl.apply(manifest)
        service.until_ready(1)
        scaler = ClusterScaler(count)
        simulate(setup, scaler)
        service.delete()

    decided = decisions(setup, policy)
    counts = [(at, wanted) for at, wanted in scaler.counts if at <= setup.trace.seconds]
    assert max(wanted for _, wanted in counts) >= 5
    assert within_one(counts, decided) >= SHARE, (counts, decided)
