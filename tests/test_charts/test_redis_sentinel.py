"""The bundled Redis with Sentinels: the commands of its pods with real servers, and its objects."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
from helm_python.errors import HelmError

from headrace_common.protocol.redis.client.connection import (
    Connection,
    ConnectionConfig,
    check_backend,
    when_reachable,
)
from headrace_common.protocol.redis.client.endpoint import Topology, parse_endpoint
from headrace_operator.settings import OperatorSettings
from headrace_testing.bundled_redis import (
    BundledPod,
    BundledPods,
    require_busybox,
    sentinel_values,
)
from headrace_testing.charts import (
    Manifest,
    named,
    of_kind,
    plain_secrets,
    render,
    render_files,
    workload,
)

# Characters with a meaning in Redis' configuration or in a shell.
PASSWORD = """p"a'ss\\w $0 #x@:/%"""


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[BundledPods]:
    with BundledPods(tmp_path) as pods:
        yield pods


@pytest.fixture
def started(pods: BundledPods) -> BundledPods:
    pods.begin()
    return pods


async def test_pods_may_start_in_any_order_and_the_gateways_url_leads_to_the_master(
    pods: BundledPods,
) -> None:
    for number in (2, 0, 1):
        pods.pods[number].start()
    await asyncio.to_thread(pods.until_ready)
    await asyncio.to_thread(pods.until_master, pods.pods[0])
    connection = Connection(ConnectionConfig(url=pods.url))
    await when_reachable(lambda: check_backend(connection), 30.0)
    await connection.close()
    refuses_strangers(pods.pods[0])


def refuses_strangers(pod: BundledPod) -> None:
    """A client without a password may ask Sentinels for the master, and nothing else."""
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


def test_servers_without_volumes_keep_the_data_while_one_has_it(tmp_path: Path) -> None:
    values = sentinel_values(persistence={"enabled": False}, usersByModel=False)
    with BundledPods(tmp_path, values) as pods:
        pods.begin()
        old, *others = pods.pods
        with old.connect() as client:
            client.set("kept", 1)
            client.execute_command("WAIT", 2, 0)
        old.kill()
        old.start()
        pods.until_ready()
        pods.until_master(*others)
        assert all("kept" in pod.keys() for pod in pods.pods)

        pods.kill()
        for pod in pods.pods:
            pod.lose_volume()
        pods.begin()
        assert "kept" not in old.keys()


async def test_a_user_provided_secret_works_with_alpines_tools(tmp_path: Path) -> None:
    hosts = ",".join(f"headrace-redis-{number}.llm.svc:26379" for number in range(3))
    url = f"redis+sentinel://:{quote(PASSWORD, safe='')}@{hosts}/headrace/0"
    secrets = {"own": {"password": PASSWORD, "url": url}}
    values = sentinel_values(existingSecret="own")
    with BundledPods(tmp_path, values, secrets, busybox=require_busybox()) as pods:
        await asyncio.to_thread(pods.begin)
        connection = Connection(ConnectionConfig(url=pods.url))
        await when_reachable(lambda: check_backend(connection), 30.0)
        await connection.close()
        old, *others = pods.pods
        refuses_strangers(old)
        await asyncio.to_thread(old.leave)

        assert pods.master in others
        old.start()
        await asyncio.to_thread(pods.until_ready)
        await asyncio.to_thread(pods.until_master, *others)


def with_values(**bundled: object) -> list[Manifest]:
    return render(sentinel_values(**bundled))


def test_every_url_names_all_sentinels() -> None:
    secret = plain_secrets(with_values())["headrace-redis"]
    hosts = tuple((f"headrace-redis-{number}.llm.svc", 26379) for number in range(3))
    for key, user in (("url", None), ("gateway-url", "gateway"), ("operator-url", "operator")):
        endpoint = parse_endpoint(secret[key])
        assert (endpoint.topology, endpoint.master) == (Topology.SENTINEL, "headrace")
        assert endpoint.addresses == hosts
        assert endpoint.options.get("username") == (user and f"headrace-{user}")


def test_engines_get_the_sentinels_without_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = with_values()
    secret = plain_secrets(objects)["headrace-redis"]
    for key, variable in workload(objects, "headrace-operator").environment.items():
        monkeypatch.setenv(key, variable.get("value", secret["url"]))
    platform = OperatorSettings().platform

    endpoint = parse_endpoint(platform.queue_url)
    assert endpoint.topology is Topology.SENTINEL
    assert "password" not in endpoint.options and endpoint.sentinel_options == {}
    assert platform.queue_ports == (26379, 6379)


def test_each_pod_has_a_name_before_it_is_ready() -> None:
    objects = with_values()
    services = {m["metadata"]["name"]: m["spec"] for m in of_kind(objects, "Service")}
    for number in range(3):
        spec = services[f"headrace-redis-{number}"]
        assert spec["clusterIP"] == "None" and spec["publishNotReadyAddresses"] is True
        pod = {"statefulset.kubernetes.io/pod-name": f"headrace-redis-{number}"}
        assert pod.items() <= spec["selector"].items()


def test_one_server_becomes_three_in_the_same_stateful_set() -> None:
    """Fields that Kubernetes does not let change are the same, so pod 0 keeps its data."""
    one = named(render(), "StatefulSet", "headrace-redis")["spec"]
    three = named(with_values(), "StatefulSet", "headrace-redis")["spec"]

    assert (one["replicas"], three["replicas"]) == (1, 3)
    for field in ("serviceName", "podManagementPolicy", "selector", "volumeClaimTemplates"):
        assert three[field] == one[field]


@pytest.mark.parametrize(("budget", "most"), [({}, 1), ({"maxUnavailable": 0}, 0)])
def test_a_drain_takes_one_server_at_a_time(budget: dict[str, int], most: int) -> None:
    found = named(with_values(pdb=budget), "PodDisruptionBudget", "headrace-redis")

    assert found["spec"]["maxUnavailable"] == most


def test_servers_prefer_different_nodes_by_default() -> None:
    own: Manifest = {"nodeAffinity": {}}
    preferred = workload(with_values(), "headrace-redis").spec["affinity"]["podAntiAffinity"]

    terms = preferred["preferredDuringSchedulingIgnoredDuringExecution"]
    assert {term["podAffinityTerm"]["topologyKey"] for term in terms} == {
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    }
    assert workload(with_values(affinity=own), "headrace-redis").spec["affinity"] == own


def test_without_sentinels_none_of_their_objects_is_rendered() -> None:
    assert "sentinel" not in "".join(
        text for path, text in render_files().items() if "/redis/" in path
    )


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"mode": "external", "external": {"existingSecret": "q"}}, "redis.mode is external"),
        ({"bundled": {"sentinel": {"downAfterMilliseconds": 1000}}}, "downAfterMilliseconds"),
        ({"bundled": {"sentinel": {"quorum": 1}}}, "quorum"),
    ],
)
def test_values_that_do_not_fit_are_refused(values: Manifest, problem: str) -> None:
    bundled = {"sentinel": {"enabled": True, **values.get("bundled", {}).get("sentinel", {})}}
    with pytest.raises(HelmError, match=problem):
        render({"redis": {**values, "bundled": bundled}})
