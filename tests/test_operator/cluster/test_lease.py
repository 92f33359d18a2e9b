"""Two operators, one Lease: at most one leads, and the other takes over without relying on
clocks."""

from collections.abc import AsyncIterator

import pytest
from kubernetes.aio.client import Configuration

from headrace_operator.cluster.cluster import Cluster
from headrace_operator.cluster.lease import LeaderLease, LeaderLeaseConfig, holder_of
from headrace_testing.kubernetes import NAMESPACE, User


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def cluster(user: User) -> AsyncIterator[Cluster]:
    found = Cluster(Configuration(host=user.url))
    yield found
    await found.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lease(cluster: Cluster, identity: str, clock: Clock) -> LeaderLease:
    config = LeaderLeaseConfig(namespace=NAMESPACE, name="op", identity=identity, duration=15)
    return LeaderLease(cluster, config, clock)


def holder(user: User) -> str:
    found = user.server.find("leases", "op")
    assert found is not None
    return holder_of(found)


async def test_the_first_leads_and_the_second_waits(
    user: User, cluster: Cluster, clock: Clock
) -> None:
    await lease(cluster, "a", clock).acquire()
    assert holder(user) == "a"
    assert not await lease(cluster, "b", clock)._tried()


async def test_a_lease_that_is_renewed_is_not_taken(
    user: User, cluster: Cluster, clock: Clock
) -> None:
    a, b = lease(cluster, "a", clock), lease(cluster, "b", clock)
    await a.acquire()
    for _ in range(5):
        assert not await b._tried()
        clock.now += 10
        assert await a._tried()
    assert holder(user) == "a"


async def test_a_silent_leader_is_replaced_after_the_duration(
    user: User, cluster: Cluster, clock: Clock
) -> None:
    a, b = lease(cluster, "a", clock), lease(cluster, "b", clock)
    await a.acquire()
    assert not await b._tried()
    clock.now += 14
    assert not await b._tried()
    clock.now += 2
    assert await b._tried()
    assert holder(user) == "b"
    assert not await a._tried(), "the old one does not take it back"
    found = user.server.find("leases", "op")
    assert found is not None
    assert found["spec"]["leaseTransitions"] == 1


async def test_a_released_lease_is_free_at_once(user: User, cluster: Cluster, clock: Clock) -> None:
    a, b = lease(cluster, "a", clock), lease(cluster, "b", clock)
    await a.acquire()
    await a.release()
    assert await b._tried()
    await a.release()
    assert holder(user) == "b", "only one's own is released"


async def test_without_the_api_server_there_is_no_leader(clock: Clock) -> None:
    away = Cluster(Configuration(host="http://127.0.0.1:1"))
    try:
        assert not await lease(away, "a", clock)._tried()
    finally:
        await away.close()
