"""The bundled Redis with Sentinels: the commands of its pods with real servers, and its objects."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from headrace_common.protocol.redis.client.connection import (
    Connection,
    ConnectionConfig,
    check_backend,
    when_reachable,
)
from headrace_testing.bundled_redis import BundledPods


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[BundledPods]:
    pods = BundledPods(tmp_path)
    try:
        yield pods
    finally:
        pods.kill()


@pytest.fixture
def started(pods: BundledPods) -> BundledPods:
    pods.start()
    pods.until_ready()
    pods.until_master(pods.pods[0])
    return pods


async def test_the_gateways_url_leads_to_the_master(started: BundledPods) -> None:
    connection = Connection(ConnectionConfig(url=started.url))
    await when_reachable(lambda: check_backend(connection), 30.0)
    await connection.close()


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2)])
def test_pods_may_start_in_any_order(pods: BundledPods, order: tuple[int, ...]) -> None:
    for number in order:
        pods.pods[number].start()
    pods.until_ready()
    pods.until_master(pods.pods[0])


def test_a_client_without_a_password_may_only_ask_sentinels_for_the_master(
    started: BundledPods,
) -> None:
    pod = started.pods[0]
    assert pod.sees() == pod.address
    with redis.Redis(host=pod.address, port=26379, protocol=2) as stranger:
        for command in ("SENTINEL FAILOVER", "SENTINEL MASTER", "SENTINEL REMOVE"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                stranger.execute_command(command, "headrace")
    with (
        redis.Redis(host=pod.address, port=6379, protocol=2) as stranger,
        pytest.raises(redis.exceptions.AuthenticationError),
    ):
        stranger.ping()


def test_a_master_that_leaves_is_replaced_before_it_ends(started: BundledPods) -> None:
    old, *others = started.pods
    with old.connect() as client:
        client.mset({f"k{number}": "v" for number in range(1000)})
    old.leave()

    assert started.master in others
    assert len(started.master.keys() - {"written"}) == 1000
    old.start()
    started.until_ready()
    started.until_master(*others)
    assert old.role() == "slave"


def test_a_master_that_dies_is_replaced(started: BundledPods) -> None:
    old, *others = started.pods
    old.kill()
    started.until_master(*others)

    old.start()
    started.until_ready()
    assert old.role() == "slave"


def test_a_restart_of_all_keeps_the_master_and_its_data(started: BundledPods) -> None:
    started.pods[0].leave()
    started.until_master(*started.pods[1:])
    master = started.master
    with master.connect() as client:
        client.set("kept", 1)
        client.execute_command("WAITAOF", 1, 0, 0)
    started.pods[0].start()
    started.until_ready()
    started.kill()

    started.start()
    started.until_ready()
    started.until_master(master)
    assert all("kept" in pod.keys() for pod in started.pods)


def test_a_master_that_lost_its_volume_takes_the_data_of_the_others(started: BundledPods) -> None:
    old, *others = started.pods
    with old.connect() as client:
        client.set("kept", 1)
        client.execute_command("WAIT", 2, 0)
    old.kill()
    old.lose_volume()

    old.start()
    started.until_ready()
    started.until_master(*others)
    assert all("kept" in pod.keys() for pod in started.pods)


def test_a_restart_of_all_keeps_the_data_if_one_volume_is_lost(started: BundledPods) -> None:
    old, *others = started.pods
    with old.connect() as client:
        client.set("kept", 1)
        client.execute_command("WAITAOF", 1, 2, 0)
    started.kill()
    old.lose_volume()

    started.start()
    started.until_ready()
    started.until_master(*others)
    assert all("kept" in pod.keys() for pod in started.pods)
