"""Schemas that would compile for minutes, sent to real gateway processes over a real Valkey."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from redis import Redis

from headrace_common.pools.limited_pool import KillReason
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.refused import RedisRefusedGrammars
from headrace_common.structured.refused_grammars import RefusedGrammar
from headrace_common.wire.keys import refused_grammar
from headrace_testing.api_keys import KeyBook
from headrace_testing.gateway import MODEL
from headrace_testing.pool_tasks import costly_schema
from headrace_testing.processes import HeadraceProcess, until
from headrace_testing.valkey import ValkeyServer

MIB = 2**20
# There is no engine, so a request that is accepted waits until its deadline.
ACCEPTED = (504, "deadline_exceeded")


class GatewayGroup:
    """Gateways that share a Valkey and a file of keys."""

    def __init__(self, checkpoint: Path, valkey: ValkeyServer, folder: Path) -> None:
        self._folder = folder
        self.book = KeyBook(folder / "keys.yaml")
        self._arguments = [
            *("--model", str(checkpoint), "--served-model-name", MODEL, "--port", "0"),
            *("--redis-url", valkey.url, "--log-format", "json"),
            *("--api-keys-file", str(self.book.path)),
        ]

    def start(self, name: str, *flags: str) -> HeadraceProcess:
        arguments = [*self._arguments, *flags]
        return HeadraceProcess("headrace_gateway", arguments, self._folder / name)


@pytest.fixture
def group(checkpoint: Path, valkey: ValkeyServer, tmp_path: Path) -> GatewayGroup:
    group = GatewayGroup(checkpoint, valkey, tmp_path)
    for tenant in ("hostile", "other"):
        group.book.add(tenant, tenant=tenant)
    return group


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=None) as client:
        yield client


def request(gateway: HeadraceProcess, group: GatewayGroup, tenant: str, **structured: Any) -> Any:
    """The arguments of a POST."""
    body = {"prompt": "Hi", "structured_outputs": structured}
    headers = {**group.book.headers(tenant), "x-request-timeout": "0.2"}
    url = f"{gateway.await_log('gateway ready')['address']}/v1/completions"
    return {"url": url, "json": body, "headers": headers}


def outcome(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def workers(gateway: HeadraceProcess) -> list[psutil.Process]:
    """The processes that check grammars, except the fork server that starts them."""
    children = psutil.Process(gateway.pid).children(recursive=True)
    return [each for each in children if each.ppid() != gateway.pid]


async def test_a_costly_schema_is_refused_within_limits_and_by_the_next_gateway_at_once(
    group: GatewayGroup, http: httpx.AsyncClient
) -> None:
    schema, patient = costly_schema(45), ("--grammar-timeout", "100")
    with group.start("one", *patient) as one, group.start("two", *patient) as two:
        first = await http.post(**request(one, group, "hostile", json=schema))
        memory = [psutil.Process(one.pid), *psutil.Process(one.pid).children(recursive=True)]
        second = await http.post(**request(two, group, "other", json=schema))

        assert all(each.memory_info().rss < 512 * MIB for each in memory)
        assert not workers(two)
        until(lambda: len(workers(one)) == 2, "the process that was ended to be replaced")

    for answer in (first, second):
        assert outcome(answer) == (400, "invalid_structured_output")
        error = answer.json()["error"]
        assert (
            error["param"] == "structured_outputs" and "to compile: have less" in error["message"]
        )


async def test_other_clients_are_served_and_a_leaving_client_frees_its_process(
    group: GatewayGroup, http: httpx.AsyncClient
) -> None:
    unlimited = [
        *("--grammar-timeout", "200", "--grammar-cpu-seconds", "200", "--grammar-memory", "8GiB"),
        *("--drain-timeout", "0"),
    ]
    with group.start("log", *unlimited) as gateway:
        costly = [
            asyncio.create_task(
                http.post(**request(gateway, group, "hostile", json=costly_schema(n)))
            )
            for n in (46, 47)
        ]
        for number in range(3):
            regex = f"other{number}"
            answer = await http.post(**request(gateway, group, "other", regex=regex))
            assert outcome(answer) == ACCEPTED
        # One is being compiled; the other waits, and is refused as busy after a while.
        assert not all(task.done() for task in costly)

        busy = {each.pid for each in workers(gateway)}
        for task in costly:
            task.cancel()
        answer = await http.post(**request(gateway, group, "hostile", regex="hostile"))
        assert outcome(answer) == ACCEPTED
        until(
            lambda: len(busy & {each.pid for each in workers(gateway)}) < 2,
            "the process of the client that left to end",
        )

        last = asyncio.create_task(
            http.post(**request(gateway, group, "hostile", json=costly_schema(48)))
        )
        await asyncio.sleep(0.2)
        checkers = workers(gateway)
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0
        until(lambda: not any(each.is_running() for each in checkers), "its processes to end")
        last.cancel()
        await asyncio.gather(*costly, last, return_exceptions=True)


async def test_refused_grammars_are_shared_and_expire(valkey: ValkeyServer) -> None:
    connection = Connection(ConnectionConfig(url=valkey.url))
    one, two = RedisRefusedGrammars(connection), RedisRefusedGrammars(connection)
    assert await two.find("digest") is None
    await one.add("digest", RefusedGrammar(KillReason.TIMEOUT, 2))

    assert await two.find("digest") == RefusedGrammar(KillReason.TIMEOUT, 2)
    with Redis.from_url(valkey.url) as client:
        assert 0 < client.pttl(refused_grammar("digest")) <= 3_600_000
    await connection.close()


def test_the_costly_schema_is_small() -> None:
    assert len(json.dumps(json.loads(costly_schema()))) < 3000
