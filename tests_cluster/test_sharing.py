"""Two ModelServices take turns on one accelerator, which is only pretended: their engines compute
on CPUs, and one of them is awake at a time."""

from collections.abc import Iterator

import pytest

from headrace_cluster.load import Load
from headrace_cluster.release import PATIENCE_S, Release, Service
from headrace_cluster.specs import MODEL, demo_service
from headrace_testing.greedy import GreedyCase
from headrace_testing.processes import until

NAMES = (MODEL, f"{MODEL}-too")
REQUESTS, CLIENTS = 100, 8  # of each model
SHARING = {
    "group": "gpu",
    "sleepLevel": 2,
    "minAwakeSeconds": 2,
    "maxAwakeSeconds": 5,
    "timeoutSeconds": 1,
}


@pytest.fixture(scope="module")
def services(release: Release) -> Iterator[list[Service]]:
    for name in NAMES:
        release.kubectl.apply(demo_service(name, sharing=SHARING))
    found = [Service(release, name) for name in NAMES]
    for service in found:
        service.until_ready(1)
    until(lambda: set(NAMES) <= set(release.models()), "both models to be listed", PATIENCE_S)
    yield found


def asleep(service: Service) -> int:
    return int(service.status.get("asleepReplicas") or 0)


def wake_ups(service: Service) -> int:
    (pod,) = service.engines()
    return str(service.kubectl("logs", pod)).count("engine awake")


def test_two_services_take_turns_under_load_from_both(
    services: list[Service], cases: list[GreedyCase]
) -> None:
    url = services[0].release.url
    before = [wake_ups(service) for service in services]
    loads = [
        Load(url, name, cases, clients=CLIENTS, requests=REQUESTS, stream=False) for name in NAMES
    ]
    with loads[0], loads[1]:
        for load in loads:
            load.join()
    for name, load in zip(NAMES, loads, strict=True):
        longest = max(one.ended - one.begun for one in load.answered)
        text = f"{name}: {len(load.answered)} right answers, the longest after {longest:.1f} s"
        print(text)  # noqa: T201
        assert len(load.answered) == REQUESTS
    turns = [wake_ups(service) - known for service, known in zip(services, before, strict=True)]
    assert sum(turns) >= 2, f"they took turns: {turns}"


def test_a_request_wakes_the_engine_that_sleeps(
    services: list[Service], cases: list[GreedyCase]
) -> None:
    for service, other in (services, services[::-1]):
        with Load(service.release.url, service.name, cases, clients=1, requests=1) as load:
            load.join()
        until(lambda s=service: asleep(s) == 0, "it to be awake", PATIENCE_S)  # type: ignore[misc]
        until(lambda o=other: asleep(o) == 1, "the other to sleep", PATIENCE_S)  # type: ignore[misc]
