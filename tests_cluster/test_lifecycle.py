"""Planned ends of engines under 24 streams: no stream is cut or waits long, and no pod is left.

Ending pods are checked, too: their containers must not be restarted.
"""

import json
import logging
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime

import httpx
import pytest

from headrace_cluster.kubectl import Manifest, PodLog, run
from headrace_cluster.load import Load
from headrace_cluster.processors import ProcessorWaits, Span
from headrace_cluster.release import Release, Service, serve
from headrace_cluster.specs import ENGINE_SETTINGS, MODEL, demo_service
from headrace_cluster.watch import PodWatch
from headrace_testing.greedy import GreedyCase
from headrace_testing.processes import until

logger = logging.getLogger(__name__)

STREAMS = 24
PLANNED_PAUSE_S = 2.0
KILLED_PAUSE_S = 15.0
NOTICE_S = 15
AFTER_LAST_STREAM_S = 5.0
# The rest of an interrupted start, and the kubelet's own time.
YOUNG_END_S = 20.0
URGENT = "headrace-test-urgent"
LESS_THAN_AN_ENGINE = 25  # thousandths of a core, out of the 50 that an engine requests
SETTINGS = {**ENGINE_SETTINGS, "maxNumSeqs": STREAMS}


@pytest.fixture(scope="module")
def engines(release: Release) -> Service:
    """Two engines, each of which has room for all streams."""
    engine = demo_service()["spec"]["engine"] | {"settings": SETTINGS}
    return serve(release, demo_service(replicas=2, engine=engine))


@pytest.fixture
def waits() -> Iterator[ProcessorWaits]:
    with ProcessorWaits() as waits:
        yield waits


@contextmanager
def streams(
    service: Service, cases: list[GreedyCase], waits: ProcessorWaits, longest_pause: float
) -> Iterator[PodWatch]:
    """24 streams while the block runs; none may pause for longer than this many seconds.

    Time in which others used the processors does not count.
    """
    load = Load(service.release.url, MODEL, cases, clients=STREAMS)
    with PodWatch(service) as watch, load:
        load.await_answers(STREAMS)
        undisturbed = load.pauses
        yield watch
        load.await_answers(STREAMS)
    told = [f"{waits.own_seconds(pause):.2f} of {pause.seconds:.2f}" for pause in load.pauses[:10]]
    logger.info(
        "%d pauses, %d undisturbed, the longest: %s", len(load.pauses), len(undisturbed), told
    )
    assert max(map(waits.own_seconds, load.pauses), default=0.0) <= longest_pause, told
    assert watch.restarts == 0, "a container was started again"


@contextmanager
def planned(service: Service, cases: list[GreedyCase], waits: ProcessorWaits) -> Iterator[PodWatch]:
    """Checks like `streams`, and that every removed engine ended its streams and was gone soon
    after."""
    before = service.engines()
    with ExitStack() as logs:
        logs_of = {pod: logs.enter_context(PodLog(service.kubectl, pod)) for pod in before}
        with streams(service, cases, waits, PLANNED_PAUSE_S) as watch:
            yield watch
            gone = {pod: watch.until_gone(pod) for pod in set(before) - set(service.engines())}
    assert gone, "no engine went"
    ends = {pod: Span(last_end(logs_of[pod], watch.told(pod)), at) for pod, at in gone.items()}
    late = {pod: waits.own_seconds(end) for pod, end in ends.items()}
    logger.info("gone after the last stream: %s, of %s", late, ends)
    assert max(late.values()) <= AFTER_LAST_STREAM_S, ends


def last_end(log: PodLog, told: float | None) -> float:
    """The time at which an engine's last stream ended, or at which it was told to end without any,
    in Unix seconds."""
    assert told is not None
    ends = [str(entry["timestamp"]) for entry in log.entries("request ended")]
    return max([told, *(datetime.fromisoformat(end).timestamp() for end in ends)])


@contextmanager
def urgent_class() -> Iterator[None]:
    """A priority class above that of engines, for the whole cluster."""
    run("kubectl", "create", "priorityclass", URGENT, "--value=1000")
    try:
        yield
    finally:
        run("kubectl", "delete", "priorityclass", URGENT)


def urgent_pod(millicores: int) -> Manifest:
    """A pod that sleeps and requests this much of a core; the scheduler preempts the youngest pod
    for it."""
    container = {
        "name": "sleeps",
        "image": "redis:7",
        "command": ["sleep", "infinity"],
        "resources": {"requests": {"cpu": f"{millicores}m"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    spec = {"priorityClassName": URGENT, "restartPolicy": "Never", "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": URGENT}, "spec": spec}


def without_drain(engines: Service) -> None:
    """Replaces engines that drain by two that have no time for it, unless they are these."""
    if engines.read()["spec"]["drain"]["timeoutSeconds"] == 0:
        return
    old = engines.engines()
    engines.patch({"drain": {"timeoutSeconds": 0}})
    until(lambda: not set(old) & set(engines.engines()), "the engines to be new", 240)
    engines.until_ready(2)


def free_millicores() -> int:
    """The resources of the only node beyond the requests of its pods."""
    (node,) = json.loads(run("kubectl", "get", "nodes", "-o", "json"))["items"]
    pods = json.loads(run("kubectl", "get", "pods", "--all-namespaces", "-o", "json"))["items"]
    requests = [
        container.get("resources", {}).get("requests", {}).get("cpu", "0")
        for pod in pods
        if pod["status"]["phase"] in ("Pending", "Running")
        for container in pod["spec"]["containers"]
    ]
    return millicores(node["status"]["allocatable"]["cpu"]) - sum(map(millicores, requests))


def millicores(quantity: str) -> int:
    if quantity.endswith("m"):
        return int(quantity[:-1])
    return int(1000 * float(quantity))


def test_scale_down(engines: Service, long_cases: list[GreedyCase], waits: ProcessorWaits) -> None:
    with planned(engines, long_cases, waits):
        engines.kubectl("scale", "modelservice", MODEL, "--replicas=1")
        engines.until_ready(1)

    engines.kubectl("scale", "modelservice", MODEL, "--replicas=2")
    engines.until_ready(2)


def test_node_drain(engines: Service, long_cases: list[GreedyCase], waits: ProcessorWaits) -> None:
    """The first engine is evicted, its successor finds no place until the node is back, then the
    other one."""
    (node,) = {str(pod["spec"]["nodeName"]) for pod in engines.kubectl.items("pods")}
    old = engines.engines()
    drain = ["kubectl", "drain", node, "--pod-selector", engines.selector, "--timeout=240s"]
    with planned(engines, long_cases, waits) as watch:
        with subprocess.Popen([*drain, "--delete-emptydir-data", "--ignore-daemonsets"]) as drained:
            try:
                until(lambda: any(watch.told(pod) for pod in old), "an engine to be evicted")
            finally:
                engines.kubectl("uncordon", node)
            assert drained.wait() == 0
        engines.until_ready(2)
    assert not set(old) & set(engines.engines())


def test_preemption(engines: Service, long_cases: list[GreedyCase], waits: ProcessorWaits) -> None:
    """A pod with a higher priority takes an engine's place, and gives it back when it ends."""
    old = engines.engines()
    with urgent_class(), planned(engines, long_cases, waits) as watch:
        engines.kubectl.apply(urgent_pod(free_millicores() + LESS_THAN_AN_ENGINE))
        until(lambda: any(watch.told(pod) for pod in old), "an engine to be preempted")
        engines.kubectl("wait", f"pod/{URGENT}", "--for=condition=Ready", "--timeout=180s")
        engines.kubectl("delete", "pod", URGENT, "--grace-period=1")
        engines.until_ready(2)


def test_rollout(engines: Service, long_cases: list[GreedyCase], waits: ProcessorWaits) -> None:
    with planned(engines, long_cases, waits):
        without_drain(engines)


def test_spot_notice(engines: Service, long_cases: list[GreedyCase], waits: ProcessorWaits) -> None:
    """If there is no time to drain, streams move within the notice period of the node."""
    without_drain(engines)
    victim = engines.engines()[0]
    with PodLog(engines.kubectl, victim) as logs_of:
        with streams(engines, long_cases, waits, PLANNED_PAUSE_S) as watch:
            engines.kubectl("delete", "pod", victim, f"--grace-period={NOTICE_S}", "--wait=false")
            watch.until_gone(victim)
            engines.until_ready(2)
    (drained,) = logs_of.entries("drained")
    assert drained["given_back"] > 0, "no stream had to move"


def test_kill(engines: Service, long_cases: list[GreedyCase], waits: ProcessorWaits) -> None:
    victim = engines.engines()[0]
    with streams(engines, long_cases, waits, KILLED_PAUSE_S) as watch:
        engines.kubectl.kill(victim)
        watch.until_gone(victim)
        engines.until_ready(2)


def test_an_engine_that_has_just_begun_goes_at_once(engines: Service) -> None:
    old = engines.engines()
    with PodWatch(engines) as watch:
        engines.kubectl("scale", "modelservice", MODEL, "--replicas=3")
        until(lambda: bool(set(engines.engines()) - set(old)), "another engine")
        (young,) = set(engines.engines()) - set(old)
        until(lambda: any(c.running for c in watch.of(young)), "its container to run")
        engines.kubectl("delete", "pod", young, "--wait=false")
        gone = watch.until_gone(young)
        told = watch.told(young)
    assert told is not None and gone - told <= YOUNG_END_S
    engines.kubectl("scale", "modelservice", MODEL, "--replicas=2")
    engines.until_ready(2)


def test_requests_that_wait_for_a_deleted_model_are_answered(engines: Service) -> None:
    """This must be the last test here: the ModelService is gone afterwards."""
    engines.kubectl("scale", "modelservice", MODEL, "--replicas=0")
    until(lambda: engines.engines() == [], "no engine to be left")
    url, body = f"{engines.release.url}/v1/completions", {"model": MODEL, "prompt": "x"}

    def ask(_: int) -> tuple[int, str]:
        answer = httpx.post(url, json=body, timeout=120)
        return answer.status_code, json.loads(answer.text)["error"]["code"]

    with ThreadPoolExecutor(STREAMS) as pool:
        answers = pool.map(ask, range(STREAMS))
        until(lambda: (engines.status.get("backlog") or 0) == STREAMS, "the requests to wait")
        engines.kubectl("delete", "modelservice", MODEL, "--wait=false")
        assert set(answers) == {(404, "model_removed")}
    until(lambda: engines.release.models() == [], "no model to be listed")
