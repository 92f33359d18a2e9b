"""`headrace redis` as a person runs it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace_cli.errors import UsageError
from headrace_cli.main import app
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.registry import RedisModelRegistry
from headrace_common.protocol.redis.users import ROLES, model_line, role_line
from headrace_common.protocol.registry import RegisteredModel, digest_of
from headrace_testing.backends import MODEL
from headrace_testing.redis_users import FILES, server_with_users, url_as
from headrace_testing.valkey import ValkeyServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = server_with_users(Path(tmp_path_factory.mktemp("users")))
    server.start()
    yield server
    server.stop()


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["redis", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_users_of_roles_and_of_models_are_printed() -> None:
    assert run("users").splitlines() == [role_line(role) for role in ROLES]
    assert run("users", "--model", "a b").splitlines() == [model_line("a b")]


def test_a_model_is_granted_and_revoked(server: ValkeyServer) -> None:
    model = RegisteredModel(name=MODEL, digest=digest_of(FILES), max_model_len=8, created=1)

    async def found() -> dict[str, RegisteredModel]:
        gateway, engine = (
            Connection(ConnectionConfig(url=url_as(server, who))) for who in ("gateway", MODEL)
        )
        await RedisModelRegistry(engine).register(model, FILES)
        models = await RedisModelRegistry(gateway).models()
        for connection in (gateway, engine):
            await connection.close()
        return models

    operator = url_as(server, "operator")
    assert asyncio.run(found()) == {}
    run("grant", MODEL, "--redis", operator)
    assert asyncio.run(found()) == {MODEL: model}
    with pytest.raises(UsageError, match="owner 'ns/m'"):
        run("revoke", MODEL, "--owner", "ns/m", "--redis", operator)
    run("revoke", MODEL, "--redis", operator)
    assert asyncio.run(found()) == {}
