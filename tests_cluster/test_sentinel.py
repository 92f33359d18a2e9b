"""The bundled Redis with Sentinels: masters are deleted, crash and hang while clients stream."""

import logging
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace_cluster.kubectl import CommandFailed
from headrace_cluster.load import Load
from headrace_cluster.release import Release, Service, installation
from headrace_cluster.specs import MODEL
from headrace_common.protocol.redis.users import model_user
from headrace_testing.greedy import GreedyCase
from headrace_testing.processes import until

logger = logging.getLogger(__name__)

CLIENTS = 4
SET = "headrace-redis"
PODS = [f"{SET}-{number}" for number in range(3)]
HANG_MS = 20_000
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    """A release for this module, with three servers."""
    with installation("--set", "redis.bundled.sentinel.enabled=true") as release:
        yield release


@pytest.fixture
def load(service: Service, cases: list[GreedyCase]) -> Load:
    return Load(service.release.url, MODEL, cases, clients=CLIENTS)


def redis_cli(release: Release, pod: str, *command: str) -> list[str]:
    """The lines of a command's reply, as the default user; none if the pod does not answer."""
    script = 'exec timeout 10 "$(command -v valkey-cli || command -v redis-cli)" "$@"'
    place = ("exec", pod, "--container", "redis", "--", "sh", "-c", script, "sh")
    try:
        return release.kubectl(*place, *command).splitlines()
    except CommandFailed:
        return []


def masters(release: Release) -> list[str]:
    return [pod for pod in PODS if redis_cli(release, pod, "ROLE")[:1] == ["master"]]


def master(release: Release) -> str:
    """The only server that is a master."""
    until(lambda: len(masters(release)) == 1, "one master", PATIENCE_S)
    return masters(release)[0]


def until_three(release: Release) -> None:
    """Waits for one master and two replicas with its data, each with the users of the model."""

    def settled() -> bool:
        found = masters(release)
        users = [redis_cli(release, pod, "ACL", "USERS") for pod in PODS]
        return (
            len(found) == 1
            and len(redis_cli(release, found[0], "ROLE")) == 2 + 2 * 3
            and all(model_user(MODEL) in names for names in users)
        )

    release.until_rolled_out(f"statefulset/{SET}")
    until(settled, "a master, two replicas and the users on all of them", PATIENCE_S)


def note(load: Load) -> None:
    """Logs the costs of the failover."""
    slowest = max(one.ended - one.begun for one in load.answered)
    median = statistics.median(one.ended - one.begun for one in load.answered)
    logger.info(
        "slowest request %.1f s (median %.1f), longest pause between tokens %.1f s",
        *(slowest, median, load.pauses[0].seconds if load.pauses else 0.0),
    )


def test_a_master_that_is_deleted_hands_over_first(service: Service, load: Load) -> None:
    release = service.release
    until_three(release)
    old = master(release)
    with load:
        load.await_answers(CLIENTS)
        release.kubectl("delete", "pod", old, "--wait=true")
        assert master(release) != old
        load.await_answers(2 * CLIENTS)
    note(load)


def test_a_master_that_is_killed_loses_no_answer(service: Service, load: Load) -> None:
    release = service.release
    until_three(release)
    with load:
        load.await_answers(CLIENTS)
        release.kubectl.kill(master(release))
        load.await_answers(2 * CLIENTS)
    note(load)


def test_a_master_that_hangs_is_replaced(service: Service, load: Load) -> None:
    release = service.release
    until_three(release)
    old = master(release)
    with load:
        load.await_answers(CLIENTS)
        redis_cli(release, old, "CLIENT", "PAUSE", str(HANG_MS), "ALL")
        until(lambda: set(masters(release)) - {old} != set(), "another master", PATIENCE_S)
        load.await_answers(2 * CLIENTS)
    note(load)
    assert master(release) != old


def test_a_restart_of_all_servers_at_once_loses_no_answer(service: Service, load: Load) -> None:
    release = service.release
    until_three(release)
    with load:
        load.await_answers(CLIENTS)
        with ThreadPoolExecutor() as threads:
            list(threads.map(release.kubectl.kill, PODS))
        load.await_answers(2 * CLIENTS)


def test_the_users_of_models_open_nothing_of_others_on_any_server(service: Service) -> None:
    release = service.release
    until_three(release)
    for pod in PODS:
        refused = ("EXISTS", "p:{other.0}:0.r"), ("FLUSHALL",), ("REPLICAOF", "NO", "ONE")
        for command in refused:
            (said,) = redis_cli(release, pod, "ACL", "DRYRUN", model_user(MODEL), *command)
            assert "no permissions" in said.lower(), (pod, command, said)
        own = ("EXISTS", f"p:{{{MODEL}.0}}:0.r")
        assert redis_cli(release, pod, "ACL", "DRYRUN", model_user(MODEL), *own) == ["OK"]
