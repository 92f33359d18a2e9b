"""A user's name and password in files, which may change while connections are open."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_common.protocol.redis.users import model_rules, model_user
from headrace_common.wire import keys
from headrace_common.wire.keys import ShardKeys
from headrace_common.wire.messages import Cancel
from headrace_testing.backends import MODEL, OverRedis, make_request, make_status
from headrace_testing.queue_contract import LIMITS
from headrace_testing.valkey import ValkeyServer
from headrace_testing.waiting import first

USER = model_user(MODEL)
RULES = model_rules(MODEL)


def write(folder: Path, password: str) -> None:
    (folder / "username").write_text(USER + "\n")
    (folder / "password").write_text(password + "\n")


@pytest.fixture
async def redis_backend(over_redis: OverRedis) -> AsyncIterator[OverRedis]:
    yield over_redis
    await over_redis.client.command("ACL DELUSER", USER)


def connect(server: ValkeyServer, folder: Path) -> Connection:
    url = server.url.replace("redis://", "redis://nobody:wrong@")
    return Connection(ConnectionConfig(url=url, credentials=folder))


async def test_a_password_is_rotated_while_an_engine_works(
    redis_backend: OverRedis,
    valkey_server: ValkeyServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await redis_backend.client.command("ACL SETUSER", USER, "on", ">first", *RULES)
    write(tmp_path, "first")
    connection = connect(valkey_server, tmp_path)
    engine = RedisEngineQueue(connection, "e", MODEL)
    await engine.start()
    await redis_backend.gateway().admit(make_request(), LIMITS)
    assert len(await engine.take(1)) == 1
    await redis_backend.client.command("ACL SETUSER", USER, ">second")
    write(tmp_path, "second")
    await redis_backend.client.command("ACL SETUSER", USER, "<first")
    await engine.beat([], make_status())
    await redis_backend.client.command("CLIENT KILL", "USER", USER)
    await engine.beat([], make_status())
    await redis_backend.gateway().send("e", MODEL, Cancel(request_id="0.r"))
    assert await first(engine.controls(), 1) == [Cancel(request_id="0.r")]
    assert await redis_backend.client.command("EXISTS", ShardKeys(MODEL).status("e")) == 1
    await engine.close()
    assert [line for line in caplog.messages if "backward compatibility" in line] == []


@pytest.mark.parametrize("error", ["WRONGPASS", "username"])
async def test_wrong_or_missing_credentials_can_be_corrected(
    redis_backend: OverRedis, valkey_server: ValkeyServer, tmp_path: Path, error: str
) -> None:
    await redis_backend.client.command("ACL SETUSER", USER, "on", ">right", *RULES)
    connection = connect(valkey_server, tmp_path)
    if error == "WRONGPASS":
        write(tmp_path, "wrong")

    async def ask() -> object:
        return await connection.client.command("EXISTS", keys.granted_model(MODEL))

    with pytest.raises(BackendUnavailable, match="(?i)" + error.replace("WRONGPASS", "username")):
        await connection.attempt(ask)
    write(tmp_path, "right")
    assert await connection.attempt(ask) == 0
    await connection.close()
