"""The bundled Redis: the command of its container with a real server, and its Secret."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio.connection import parse_url
from redis.exceptions import AuthenticationError, NoPermissionError

from headrace_common.protocol.redis.client.connection import (
    Connection,
    ConnectionConfig,
    check_backend,
    when_reachable,
)
from headrace_common.protocol.redis.client.endpoint import parse_endpoint
from headrace_common.protocol.redis.users import model_line, model_user
from headrace_testing.charts import CHART, named, of_kind, plain_secrets, render, scenario, workload
from headrace_testing.valkey import free_port, require_server

PASSWORD = "a-password"
# The state that the operator saved before a restart.
MADE = f"user default on nopass ~* &* +@all\n{model_line('chat')} >c\nuser former on nopass +@all\n"


@pytest.fixture
def port(tmp_path: Path) -> int:
    return free_port()


@pytest_asyncio.fixture
async def server(tmp_path: Path, port: int) -> AsyncIterator[Connection]:
    """The container's command as rendered, with the container's paths below a folder."""
    objects = render()
    config = named(objects, "ConfigMap", "headrace-redis")["data"]["redis.conf"]
    command = workload(objects, "headrace-redis").containers[0]["command"]
    for folder in ("data", "etc", "run", "bin"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bin" / "valkey-server").symlink_to(require_server())
    (tmp_path / "etc" / "redis.conf").write_text(_moved(config, tmp_path, port))
    for role in ("gateway", "operator"):
        text = named(objects, "ConfigMap", "headrace-redis")["data"][f"{role}.acl"]
        (tmp_path / "etc" / f"{role}.acl").write_text(text)
    (tmp_path / "data" / "users.acl").write_text(MADE)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "REDIS_PASSWORD": PASSWORD,
        "REDISCLI_AUTH": PASSWORD,
        "GATEWAY_PASSWORD": "g",
        "OPERATOR_PASSWORD": "o",
    }
    script = [*command[:-1], _moved(command[-1], tmp_path, port)]
    process = await asyncio.create_subprocess_exec(
        *script, env=environment, stdout=subprocess.DEVNULL
    )
    connection = Connection(ConnectionConfig(url=f"redis://:{PASSWORD}@127.0.0.1:{port}/0"))
    try:
        await when_reachable(lambda: check_backend(connection), 30.0)
        yield connection
    finally:
        await connection.close()
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0


def _moved(text: str, folder: Path, port: int) -> str:
    moved = text.replace("/etc/redis", f"{folder}/etc").replace("/run/redis", f"{folder}/run")
    moved = moved.replace(" /data", f" {folder}/data").replace("port 6379", f"port {port}")
    return moved.replace("bind * -::*", "bind 127.0.0.1")


async def test_the_bundled_server_is_fit_for_the_queue(server: Connection, tmp_path: Path) -> None:
    """check_backend has accepted it: version, memory policy, scripts."""
    answer = await server.client.command("CONFIG", "GET", "*")
    settings = dict(zip(answer[::2], answer[1::2], strict=True))

    assert settings[b"appendonly"] == b"yes"
    assert settings[b"maxmemory-policy"] == b"noeviction"
    assert settings[b"maxmemory"] == str(384 * 2**20).encode()
    assert (tmp_path / "data" / "appendonlydir").is_dir()


async def test_the_bundled_server_refuses_callers_without_the_password(
    server: Connection, port: int
) -> None:
    stranger = Connection(ConnectionConfig(url=f"redis://127.0.0.1:{port}/0"))

    with pytest.raises(AuthenticationError):
        await stranger.client.command("PING")
    await stranger.close()


async def test_the_password_is_in_a_file_that_only_the_server_reads(
    server: Connection, tmp_path: Path
) -> None:
    path = tmp_path / "data" / "users.acl"

    assert path.stat().st_mode & 0o077 == 0
    assert PASSWORD in path.read_text()
    assert not (tmp_path / "data" / "users.acl.new").exists()


@pytest.mark.parametrize(
    ("user", "password"),
    [("headrace-gateway", "g"), ("headrace-operator", "o"), (model_user("chat"), "c")],
)
async def test_each_role_and_model_has_its_own_user(
    server: Connection, port: int, user: str, password: str
) -> None:
    """The operator has saved the models' users before this start."""
    connection = Connection(ConnectionConfig(url=f"redis://{user}:{password}@127.0.0.1:{port}/0"))
    assert await connection.client.command("PING")
    with pytest.raises(NoPermissionError):
        await connection.client.command("FLUSHALL")
    await connection.close()
    names = await server.client.command("ACL USERS")
    assert sorted(names) == ["default", model_user("chat"), "headrace-gateway", "headrace-operator"]


def test_the_password_of_a_single_user_is_in_a_separate_file() -> None:
    objects = render({"redis": {"bundled": {"usersByModel": False}}})
    data = named(objects, "ConfigMap", "headrace-redis")["data"]

    assert set(data) == {"redis.conf"}
    assert "include /run/redis/auth.conf" in data["redis.conf"]
    assert set(plain_secrets(objects)["headrace-redis"]) == {"password", "url"}
    variables = workload(objects, "headrace-operator").environment
    assert "HEADRACE_OPERATOR_REDIS_ADMIN_URL" not in variables


def test_the_secret_holds_a_url_with_its_password_and_the_service_s_name() -> None:
    objects = render()
    secret = plain_secrets(objects)["headrace-redis"]
    service = named(objects, "Service", "headrace-redis")
    port = service["spec"]["ports"][0]["port"]

    assert secret["password"].isalnum()
    assert secret["url"] == f"redis://:{secret['password']}@headrace-redis.llm.svc:{port}/0"


def test_a_named_secret_replaces_the_generated_one() -> None:
    objects = render({"redis": {"bundled": {"existingSecret": "mine"}}})
    variables = workload(objects, "headrace-redis").environment

    assert of_kind(objects, "Secret") == []
    reference = variables["REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": "mine", "key": "password"}


def test_with_an_external_redis_there_is_no_bundled_one() -> None:
    objects = render(scenario("external-redis-values"))

    assert of_kind(objects, "StatefulSet") == []
    assert of_kind(objects, "Secret") == []
    assert "headrace-redis" not in {m["metadata"]["name"] for m in objects}


def test_a_custom_ca_is_mounted_at_the_path_in_the_url() -> None:
    objects = render(scenario("tls-values"))
    url = plain_secrets(objects)["headrace-redis"]["url"]
    mounts = workload(objects, "headrace-gateway").containers[0]["volumeMounts"]

    assert url == "rediss://redis.example.com:6380/0?ssl_ca_certs=/etc/headrace/redis-ca/ca.crt"
    assert "/etc/headrace/redis-ca" in {mount["mountPath"] for mount in mounts}


def test_the_client_accepts_a_url_with_a_ca() -> None:
    url = plain_secrets(render(scenario("tls-values")))["headrace-redis"]["url"]

    assert dict(parse_url(url))["ssl_ca_certs"] == "/etc/headrace/redis-ca/ca.crt"


@pytest.mark.parametrize(("retain", "policy"), [(False, "Delete"), (True, "Retain")])
def test_the_claim_is_deleted_with_the_release_unless_retained(retain: bool, policy: str) -> None:
    values = {"redis": {"bundled": {"persistence": {"retain": retain}}}}
    spec = named(render(values), "StatefulSet", "headrace-redis")["spec"]

    assert spec["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == policy


def test_without_persistence_there_is_no_claim() -> None:
    values = {"redis": {"bundled": {"persistence": {"enabled": False}}}}
    objects = render(values)
    redis = workload(objects, "headrace-redis")

    assert "volumeClaimTemplates" not in redis.manifest["spec"]
    assert {"name": "data", "emptyDir": {}} in redis.spec["volumes"]
    config = named(objects, "ConfigMap", "headrace-redis")["data"]["redis.conf"]
    assert "appendonly no" in config


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://a:26379,b:26379/main/0",
        "rediss+sentinel://a/main",
        "redis+cluster://a,b:7000",
        "rediss+cluster://a",
    ],
)
def test_urls_of_sentinels_and_clusters_are_accepted(url: str) -> None:
    objects = render({"redis": {"mode": "external", "external": {"url": url}}})

    assert parse_endpoint(plain_secrets(objects)["headrace-redis"]["url"]) == parse_endpoint(url)


def test_pods_may_reach_sentinels_and_their_masters() -> None:
    objects = render(scenario("sentinel-values"))
    egress = named(objects, "NetworkPolicy", "headrace-gateway")["spec"]["egress"]
    ports = [{item["port"] for item in rule.get("ports", ())} for rule in egress]
    operator = workload(objects, "headrace-operator").environment

    assert {26380, 6380} in ports
    assert operator["HEADRACE_OPERATOR_ENGINE_REDIS_PORTS"]["value"] == "[26380,6380]"


def test_each_role_may_have_its_own_url() -> None:
    objects = render(scenario("sentinel-values"))
    pods = {
        role: workload(objects, f"headrace-{role}").environment for role in ("gateway", "operator")
    }
    own = {
        role: env[f"HEADRACE_{role.upper()}_REDIS_URL"]["valueFrom"]["secretKeyRef"]
        for role, env in pods.items()
    }

    assert own == {role: {"name": "queue", "key": role} for role in ("gateway", "operator")}
    assert pods["operator"]["HEADRACE_OPERATOR_ENGINE_REDIS_SECRET_KEY"]["value"] == "engine"


def test_a_client_certificate_is_mounted_with_the_ca() -> None:
    pod = workload(render(scenario("sentinel-values")), "headrace-gateway").spec

    assert {"name": "redis-ca", "secret": {"secretName": "queue-tls"}} in pod["volumes"]


def test_there_is_a_user_for_each_role_with_no_password_and_no_category() -> None:
    users = {path.stem: path.read_text().split() for path in (CHART / "files/acl").iterdir()}

    assert users.keys() == {"gateway", "engine", "operator"}
    for role, words in users.items():
        assert words[:3] == ["user", f"headrace-{role}", "on"]
        assert {word[0] for word in words[3:]} == {"~", "+"}
        assert not any(word.startswith(("+@", "~*")) for word in words)


def reserved(values: dict[str, Any], kind: str) -> list[str]:
    """Names that the operator does not let ModelServices use."""
    operator = workload(render(values), "headrace-operator")
    variable = operator.environment.get(f"HEADRACE_OPERATOR_RESERVED_{kind}", {"value": "[]"})
    found: list[str] = json.loads(variable["value"])
    return found


def test_the_queue_s_volume_and_password_are_reserved() -> None:
    stateful = named(render(), "StatefulSet", "headrace-redis")
    (template,) = stateful["spec"]["volumeClaimTemplates"]
    claim = f"{template['metadata']['name']}-{stateful['metadata']['name']}-0"
    (entry,) = reserved({}, "CLAIMS")
    assert claim.startswith(entry.removesuffix("*"))
    assert "headrace-redis" in reserved({}, "SECRETS")
    assert "sh.helm.release.v1.*" in reserved({}, "SECRETS")


def test_secrets_that_the_values_name_are_reserved_too() -> None:
    values = {
        "gateway": {
            "apiKeys": {"enabled": True, "existingSecret": "keys", "testKeySecret": "test-key"},
            "hfTokenSecret": "hub",
        },
        "redis": {"mode": "external", "external": {"existingSecret": "mine"}},
    }
    assert {"mine", "keys", "test-key", "hub"} <= set(reserved(values, "SECRETS"))
    assert reserved(values, "CLAIMS") == []


def test_the_bundled_server_is_not_evicted_by_default() -> None:
    budget = named(render(), "PodDisruptionBudget", "headrace-redis")["spec"]
    server = workload(render(), "headrace-redis")
    assert budget["maxUnavailable"] == 0
    assert budget["selector"]["matchLabels"].items() <= server.labels.items()
    without = render({"redis": {"bundled": {"pdb": {"enabled": False}}}})
    assert "headrace-redis" not in [
        each["metadata"]["name"] for each in of_kind(without, "PodDisruptionBudget")
    ]


def test_the_bundled_server_has_the_priority_that_the_values_name() -> None:
    objects = render({"redis": {"bundled": {"priorityClassName": "important"}}})
    assert workload(objects, "headrace-redis").spec["priorityClassName"] == "important"


def test_an_image_that_never_started_can_be_replaced() -> None:
    """With OrderedReady the StatefulSet would wait indefinitely for the broken pod."""
    stateful = named(render(), "StatefulSet", "headrace-redis")
    assert stateful["spec"]["podManagementPolicy"] == "Parallel"
