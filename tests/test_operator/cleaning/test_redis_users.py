"""Redis users of ModelServices: created, rotated and removed, over the API server and a real
Valkey."""

import base64
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio.client import Configuration
from redis.exceptions import RedisError

from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.registry import RedisModelRegistry
from headrace_common.protocol.redis.users import model_user
from headrace_common.wire.keys import slot
from headrace_operator import names
from headrace_operator.cleaning.redis_users import ROTATED, RedisUsers
from headrace_operator.cluster.cluster import Cluster
from headrace_operator.desired.deployment import deployment
from headrace_operator.settings import OperatorSettings
from headrace_operator.spec.model_service import ModelService
from headrace_testing.backends import OverRedis
from headrace_testing.kubernetes import NAMESPACE, User
from headrace_testing.model_services import HUB, PLATFORM, body
from headrace_testing.operators import Directory, Scene, engine_status
from headrace_testing.redis_users import server_with_users, url_as
from headrace_testing.valkey import ValkeyServer
from headrace_testing.waiting import eventually

USER = model_user("chat")
SECRET = names.redis_secret("qwen")
CHAT = {**HUB, "servedName": "chat"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = server_with_users(Path(tmp_path_factory.mktemp("users")))
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def over(server: ValkeyServer) -> AsyncIterator[OverRedis]:
    over = OverRedis(server.url)
    await over.wipe()
    await over.client.command("ACL LOAD")
    yield over
    for user in await over.client.command("ACL USERS"):
        if user.startswith(model_user("")) and "/" not in user:
            await over.client.command("ACL DELUSER", user)
    await over.client.command("ACL SAVE")
    await over.close()


@pytest.fixture
async def users(user: User, scene: Scene, over: OverRedis) -> AsyncIterator[RedisUsers]:
    cluster = Cluster(Configuration(host=user.url))
    registry = RedisModelRegistry(over.connect())
    yield RedisUsers(
        cluster, over.connect(), b"k" * 16, registry, Directory(scene), NAMESPACE, scene.clock
    )
    await cluster.close()


def password(user: User) -> str:
    found = user.server.find("secrets", SECRET)
    assert found is not None
    return base64.b64decode(found["data"]["password"]).decode()


async def may_connect(server: ValkeyServer, tmp_path: Path, word: str) -> bool:
    (tmp_path / "username").write_text(USER)
    (tmp_path / "password").write_text(word)
    connection = Connection(ConnectionConfig(url=server.url, credentials=tmp_path))
    try:
        return bool(await connection.client.command("PING"))
    except Exception as error:  # noqa: BLE001 - distinguished below
        assert "username-password" in str(error)
        return False
    finally:
        await connection.close()


async def passwords(over: OverRedis) -> int:
    found: Any = await over.client.command("ACL GETUSER", USER)
    return 0 if found is None else len(found["passwords"])


async def test_a_model_service_gets_its_models_redis_user(
    user: User, users: RedisUsers, over: OverRedis, server: ValkeyServer, tmp_path: Path
) -> None:
    await user.create(body(model=CHAT))
    await users.run_once()
    assert await may_connect(server, tmp_path, password(user))
    connection = Connection(ConnectionConfig(url=server.url, credentials=tmp_path))
    assert await connection.client.command("EXISTS", "p:{chat.0}:0.r") == 0
    with pytest.raises(Exception, match="(?i)no permission"):
        await connection.client.command("EXISTS", "p:{other.0}:0.r")
    await connection.close()
    found = user.server.find("secrets", SECRET)
    assert found is not None and found["metadata"]["ownerReferences"][0]["name"] == "qwen"
    assert await over.client.command("HKEYS", "mg:{m}") == [b"", b"chat"]
    first = password(user)
    await users.run_once()
    assert password(user) == first and await passwords(over) == 1


async def test_engines_that_share_an_accelerator_may_use_its_slot(
    user: User, users: RedisUsers, server: ValkeyServer, tmp_path: Path
) -> None:
    await user.create(body(model=CHAT, sharing={"group": "gpu"}))
    await users.run_once()
    assert await may_connect(server, tmp_path, password(user))
    connection = Connection(ConnectionConfig(url=server.url, credentials=tmp_path))
    assert await connection.client.command("HGETALL", slot(f"{NAMESPACE}/gpu")) == {}
    with pytest.raises(Exception, match="(?i)no permission"):
        await connection.client.command("HGETALL", slot("other/gpu"))
    await connection.close()


async def test_old_and_new_passwords_both_work_for_a_while(
    user: User,
    users: RedisUsers,
    over: OverRedis,
    server: ValkeyServer,
    scene: Scene,
    tmp_path: Path,
) -> None:
    await user.create(body(model=CHAT))
    await users.run_once()
    old = password(user)
    scene.now += ROTATED
    change = {"metadata": {"annotations": {names.REDIS_PASSWORD: "2"}}}
    await user.patch(names.API_VERSION, names.PLURAL, "qwen", change)
    await users.run_once()
    new = password(user)
    assert new != old
    assert [await may_connect(server, tmp_path, each) for each in (old, new)] == [True, True]
    scene.now += ROTATED
    await users.run_once()
    assert [await may_connect(server, tmp_path, each) for each in (old, new)] == [False, True]


async def test_a_deleted_secret_comes_back(user: User, users: RedisUsers, over: OverRedis) -> None:
    await user.create(body(model=CHAT))
    await users.run_once()
    old = password(user)
    await user.delete("v1", "secrets", SECRET)
    await users.run_once()
    assert password(user) == old and await passwords(over) == 1


async def test_a_user_that_redis_has_lost_comes_back(
    user: User, users: RedisUsers, over: OverRedis, server: ValkeyServer, tmp_path: Path
) -> None:
    await user.create(body(model=CHAT))
    await users.run_once()
    await over.client.command("ACL DELUSER", USER)
    await users.run_once()
    assert await may_connect(server, tmp_path, password(user))


async def test_users_are_kept_over_a_restart_of_redis(
    user: User, users: RedisUsers, over: OverRedis
) -> None:
    await user.create(body(model=CHAT))
    await users.run_once()
    await over.client.command("ACL LOAD")
    assert await passwords(over) == 1


async def test_users_exist_on_a_replica_that_becomes_master(
    user: User,
    users: RedisUsers,
    over: OverRedis,
    server: ValkeyServer,
    scene: Scene,
    tmp_path: Path,
) -> None:
    """They hold after a restart of the replica without users; a removed user is removed there,
    too."""
    replica = server_with_users(tmp_path / "replica")
    replica.start()
    second = OverRedis(replica.url)
    try:
        await second.client.command("REPLICAOF", "127.0.0.1", server.port)
        await eventually(lambda: in_step(second))
        await user.create(body(model=CHAT))
        await users.run_once()
        assert await may_connect(replica, tmp_path, password(user))
        replica.stop()
        (tmp_path / "replica" / "users.acl").write_text("user default on nopass ~* &* +@all\n")
        replica.start()
        await eventually(lambda: repeated(second, server.port))
        await users.run_once()
        await second.client.command("ACL LOAD")
        assert await may_connect(replica, tmp_path, password(user))
        await user.delete(names.API_VERSION, names.PLURAL, "qwen")
        await users.run_once()
        assert not await may_connect(replica, tmp_path, password(user))
    finally:
        await second.close()
        replica.stop()


async def in_step(over: OverRedis) -> bool:
    return bool((await over.client.command("ROLE"))[3] == b"connected")


async def repeated(over: OverRedis, port: int) -> bool:
    """Makes a restarted server the same replica again."""
    try:
        await over.client.command("REPLICAOF", "127.0.0.1", port)
        return await in_step(over)
    except RedisError:
        return False


async def test_a_user_is_removed_after_its_model_service_and_engines(
    user: User, users: RedisUsers, over: OverRedis, scene: Scene
) -> None:
    await user.create(body(model=CHAT))
    await users.run_once()
    await user.delete(names.API_VERSION, names.PLURAL, "qwen")
    scene.statuses = [engine_status("qwen-1", draining=True)]
    await users.run_once()
    assert await passwords(over) == 1
    scene.statuses = []
    await users.run_once()
    assert await passwords(over) == 0
    assert await over.client.command("HKEYS", "mg:{m}") == [b""]


async def test_of_two_services_with_one_name_the_older_has_the_user(
    user: User, users: RedisUsers, over: OverRedis
) -> None:
    for name, at in (("a", "2026-01-02T00:00:00Z"), ("b", "2026-01-01T00:00:00Z")):
        service = body(model=CHAT)
        service["metadata"] |= {"name": name, "creationTimestamp": at}
        await user.create(service)
    await users.run_once()
    made = {each["metadata"]["name"] for each in user.server.all("secrets")}
    oldest = min(
        user.server.all("modelservices"), key=lambda each: each["metadata"]["creationTimestamp"]
    )
    assert made == {names.redis_secret(oldest["metadata"]["name"])}


async def test_the_operator_s_own_redis_user_may_not_make_users(server: ValkeyServer) -> None:
    connection = Connection(ConnectionConfig(url=url_as(server, "operator")))
    with pytest.raises(Exception, match="(?i)no permission"):
        await connection.client.command("ACL USERS")
    await connection.close()


def test_an_engine_s_pod_mounts_its_user() -> None:
    from dataclasses import replace

    service = ModelService.parse(body(model=CHAT))
    platform = replace(PLATFORM, queue_users=True, queue_url="redis://queue:6379/0")
    pod = deployment(service, platform, replicas=1)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert env["HEADRACE_ENGINE_REDIS_URL"] == "redis://queue:6379/0"
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts["queue-user"] == env["HEADRACE_ENGINE_REDIS_CREDENTIALS"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["queue-user"]["secret"]["secretName"] == SECRET


def test_invalid_settings_for_engine_users_are_refused() -> None:
    with pytest.raises(ValueError, match="engine_redis_url must be set"):
        OperatorSettings(
            engine_image="e", redis_url="redis://:p@q:1", redis_admin_url=f"redis://:{'p' * 16}@q:1"
        )
    with pytest.raises(ValueError, match="at least 16 characters"):
        OperatorSettings(engine_image="e", redis_admin_url="redis://:short@q:1")
