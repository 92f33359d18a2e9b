"""`headrace adapters` as a person or a script runs it; an engine loads what it is told."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace_cli.errors import CliError
from headrace_cli.main import app
from headrace_common.protocol.adapters import AdapterReport
from headrace_common.protocol.redis.adapters import RedisAdapterSets
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_testing.backends import MODEL, make_status
from headrace_testing.valkey import ValkeyServer

DIGEST = "1" * 32
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(Path(tmp_path_factory.mktemp("valkey")), appendonly=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module", autouse=True)
def engine(server: ValkeyServer) -> Iterator[None]:
    """An engine that loads every adapter, except those in /bad."""
    begun, ended = threading.Event(), threading.Event()

    async def follow() -> None:
        connection = Connection(ConnectionConfig(url=server.url))
        queue, sets = RedisEngineQueue(connection, "e", MODEL), RedisAdapterSets(connection)
        while not ended.is_set():
            await queue.beat((), make_status("e"))
            known = (await sets.read(MODEL)).adapters
            loaded = {a.adapter_id: DIGEST for a in known if a.path != "/bad"}
            refused = {a.adapter_id: "rank 64 is too much" for a in known if a.path == "/bad"}
            await sets.report(MODEL, "e", AdapterReport(loaded, refused))
            begun.set()
            await asyncio.sleep(0.02)
        await connection.close()

    thread = threading.Thread(target=lambda: asyncio.run(follow()))
    thread.start()
    assert begun.wait(LIMIT_S), "the engine told nothing"
    yield
    ended.set()
    thread.join()


def adapters(server: ValkeyServer, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["adapters", *arguments, "--redis", server.url])


def listed(server: ValkeyServer, *flags: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(adapters(server, "list", "--json", *flags).stdout)
    return found


def test_an_adapter_is_loaded_listed_replaced_and_unloaded(server: ValkeyServer) -> None:
    assert adapters(server, "load", "sql", "/adapters/sql").exit_code == 0
    (row,) = listed(server)
    assert (row["name"], row["state"], row["path"]) == ("sql", "ready", "/adapters/sql")
    assert (row["engines"], row["working"], row["refused"]) == (1, 1, "")
    again = adapters(server, "load", "sql", "/adapters/new")
    assert isinstance(again.exception, CliError)
    assert "already been loaded" in str(again.exception)

    assert adapters(server, "load", "sql", "/adapters/new", "--replace").exit_code == 0
    assert [row["path"] for row in listed(server)] == ["/adapters/new"]
    table = adapters(server, "list").stdout
    assert "sql" in table and "1/1" in table

    assert json.loads(adapters(server, "unload", "sql", "--json").stdout) == {"unloaded": "sql"}
    assert listed(server) == []
    assert [row["state"] for row in listed(server, "--all")] == ["retired", "retired"]
    missing = adapters(server, "unload", "sql")
    assert isinstance(missing.exception, CliError)
    assert "cannot be found" in str(missing.exception)


def test_the_reason_of_a_refusal_is_shown_and_nothing_changes(server: ValkeyServer) -> None:
    before = listed(server, "--all")

    refused = adapters(server, "load", "bad", "/bad", "--model", MODEL)

    assert isinstance(refused.exception, CliError)
    assert str(refused.exception) == "rank 64 is too much"
    assert listed(server, "--all") == before
