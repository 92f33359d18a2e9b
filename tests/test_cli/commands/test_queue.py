"""`headrace queue` as a person or a script runs it."""

import asyncio
import csv
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner, Result

from headrace_cli.errors import CliError, UsageError
from headrace_cli.main import app
from headrace_cli.queues.queues import queue_url
from headrace_common.protocol.base import Outcome, Progress, QueueLimits
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_common.sealing.keyring import Keyring, new_key, write_keyring
from headrace_common.wire import keys
from headrace_common.wire.messages import ChoiceState
from headrace_operator.simulation.workload import read_csv
from headrace_testing.backends import MODEL, OverRedis, make_request, make_status
from headrace_testing.processes import until
from headrace_testing.valkey import ValkeyServer

LIMITS = QueueLimits()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(Path(tmp_path_factory.mktemp("valkey")), appendonly=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def waiting(server: ValkeyServer) -> list[str]:
    """Three requests of which an engine has one."""

    async def fill() -> list[str]:
        backend = OverRedis(server.url)
        await backend.wipe()
        gateway, engine = backend.gateway(), backend.engine()
        requests = [make_request() for _ in range(3)]
        for request in requests:
            await gateway.admit(request, LIMITS)
        await engine.take(1)
        await backend.close()
        connection = Connection(ConnectionConfig(url=server.url))
        await RedisEngineQueue(connection, "e", MODEL).beat((), make_status("e"))
        await connection.close()
        return [request.request_id for request in requests]

    return asyncio.run(fill())


@pytest.fixture
def poisoned(server: ValkeyServer) -> list[str]:
    """Two requests that crashed their engines."""

    async def fill() -> list[str]:
        backend = OverRedis(server.url)
        await backend.wipe()
        found = [await poison(backend), await poison(backend)]
        await backend.close()
        return found

    return asyncio.run(fill())


async def poison(backend: OverRedis) -> str:
    gateway, request = backend.gateway(), make_request()
    rid = request.request_id
    await gateway.admit(request, LIMITS)
    for attempt in range(1, 6):
        engine = backend.engine(f"e{attempt}")
        leases = await (engine.take(1) if attempt == 1 else engine.reap(1))
        for _ in leases:
            item = Progress(
                request_id=rid, attempt=attempt, journaled=(0,), choices=(ChoiceState(),)
            )
            await engine.beat([item], make_status(engine.engine_id))
            await gateway.release(rid, MODEL, engine.engine_id, attempt)
    return rid


def queue(server: ValkeyServer, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["queue", *arguments, "--redis", server.url])


def read(server: ValkeyServer, *arguments: str) -> Any:
    done = queue(server, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_status_is_a_table_or_json(server: ValkeyServer, waiting: list[str]) -> None:
    (status,) = read(server, "status")
    assert status["model"] == MODEL
    assert (status["depth"]["waiting"], status["depth"]["pending"]) == (2, 1)
    assert [engine["engine_id"] for engine in status["engines"]] == ["e"]
    table = queue(server, "status").stdout
    assert MODEL in table and "waiting" in table
    assert read(server, "status", "--model", "other")[0]["depth"]["waiting"] == 0


def test_peek_lists_waiting_and_running_requests(server: ValkeyServer, waiting: list[str]) -> None:
    assert [one["request_id"] for one in read(server, "peek", "--model", MODEL)] == waiting[1:]
    (running,) = read(server, "peek", "--model", MODEL, "--running")
    assert (running["request_id"], running["owner"]) == (waiting[0], "e")
    assert "tenant" in queue(server, "peek", "--model", MODEL).stdout


def test_dead_letters_are_listed_replayed_and_purged(
    server: ValkeyServer, poisoned: list[str]
) -> None:
    first, second = poisoned
    letters = read(server, "dead", "--model", MODEL)
    assert [letter["request_id"] for letter in letters] == [second, first]
    assert {(one["why"], one["failures"], one["replayable"]) for one in letters} == {
        ("poisoned", 4, True)
    }
    assert read(server, "replay", first, "--model", MODEL) == {"replayed": [first]}
    assert [one["request_id"] for one in read(server, "peek", "--model", MODEL)] == [first]
    assert read(server, "purge", "--all", "--model", MODEL) == {"purged": 1}
    assert read(server, "dead", "--model", MODEL) == []


def test_a_sealed_request_is_replayed_with_its_keys_alone(
    server: ValkeyServer, tmp_path: Path
) -> None:
    key, file = new_key(), tmp_path / "keyring"
    file.write_text(write_keyring([key]))

    async def fill() -> str:
        backend = OverRedis(server.url, ring=Keyring([key]))
        await backend.wipe()
        await backend.gateway().start()
        found = await poison(backend)
        await backend.close()
        return found

    rid = asyncio.run(fill())
    refused = queue(server, "replay", rid, "--model", MODEL).exception
    assert isinstance(refused, UsageError) and "--sealing-keys-file" in str(refused)
    with_keys = ("--model", MODEL, "--sealing-keys-file", str(file))
    assert read(server, "replay", rid, *with_keys) == {"replayed": [rid]}
    (waiting,) = read(server, "peek", "--model", MODEL)
    assert (waiting["request_id"], waiting["tenant"]) == (rid, "default")


def test_all_dead_letters_can_be_replayed(server: ValkeyServer, poisoned: list[str]) -> None:
    done = queue(server, "replay", "--all", "--model", MODEL)
    assert (done.exit_code, "Queued again: 2." in done.stderr) == (0, True)


def test_impossible_commands_are_refused_with_a_reason(
    server: ValkeyServer, poisoned: list[str]
) -> None:
    assert isinstance(queue(server, "replay", "0.other", "--model", MODEL).exception, UsageError)
    assert isinstance(queue(server, "replay", "--model", MODEL).exception, UsageError)
    read(server, "purge", poisoned[0], "--model", MODEL)
    refused = queue(server, "replay", poisoned[0], "--model", MODEL).exception
    assert "no dead letter" in str(refused)


def test_the_only_model_need_not_be_named(server: ValkeyServer, poisoned: list[str]) -> None:
    first, second = poisoned
    assert [letter["request_id"] for letter in read(server, "dead")] == [second, first]
    assert read(server, "replay", first) == {"replayed": [first]}
    assert [one["request_id"] for one in read(server, "peek")] == [first]
    assert read(server, "purge", "--all") == {"purged": 1}
    assert read(server, "purge", "--waiting") == {"cancelled": 1}


def test_several_models_are_named_to_choose_from(server: ValkeyServer, waiting: list[str]) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.hset(keys.MODELS, "another", b"")
    assert f"--model, of another, {MODEL}" in str(queue(server, "peek").exception)
    unknown = queue(server, "peek", "--model", "nope").exception
    assert str(unknown) == f"there is no queue of nope: there is another, {MODEL}"
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    refused = queue(server, "dead").exception
    assert isinstance(refused, UsageError) and "no queue of any model" in str(refused)


def test_waiting_requests_can_be_cancelled(server: ValkeyServer, waiting: list[str]) -> None:
    assert read(server, "purge", "--waiting", "--model", MODEL) == {"cancelled": 2}
    assert read(server, "status")[0]["depth"]["waiting"] == 0


def test_a_server_that_is_away_is_named_without_its_password() -> None:
    done = CliRunner().invoke(app, ["queue", "status", "--redis", "redis://u:secret@127.0.0.1:1"])
    assert isinstance(done.exception, CliError)
    assert "127.0.0.1:1" in str(done.exception) and "secret" not in str(done.exception)


def test_the_queue_of_a_running_up_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "valkey").mkdir()
    (tmp_path / "valkey" / "valkey.sock").touch()
    assert queue_url(None, tmp_path) == f"unix://{tmp_path}/valkey/valkey.sock"
    assert queue_url("redis://r", tmp_path) == "redis://r"


async def answer(backend: OverRedis, tenant: str, prompt: int, output: int) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    request = replace(make_request(prompt=(1,) * prompt), tenant=tenant)
    await gateway.admit(request, LIMITS)
    (lease,) = await engine.take(1)
    state = ChoiceState(token_ids=(7,) * output, finish_reason="length")
    await engine.finish(request.request_id, lease.attempt, Outcome(choices=(state,)))


def test_traffic_is_recorded_until_ctrl_c_as_the_simulator_reads_it(
    server: ValkeyServer, tmp_path: Path
) -> None:
    backend = OverRedis(server.url)
    file = tmp_path / "trace.csv"
    with asyncio.Runner() as runner:
        runner.run(backend.wipe())
        runner.run(answer(backend, "before", 1, 1))
        recording = subprocess.Popen(
            [sys.executable, "-m", "headrace_cli", "queue", "record", "--redis", server.url]
            + ["--output", str(file), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert recording.stderr is not None
        assert f"Recording {MODEL}" in recording.stderr.readline()
        runner.run(answer(backend, "team-a", 5, 9))
        until(lambda: len(file.read_text().splitlines()) == 2, "the first request to be written")
        runner.run(answer(backend, "team-b", 3, 0))
        runner.run(answer(backend, "team-a", 4, 2))
        until(lambda: len(file.read_text().splitlines()) == 4, "all requests to be written")
        recording.send_signal(signal.SIGINT)
        printed, _ = recording.communicate(timeout=60)
        runner.run(backend.close())

    trace = read_csv(file)
    assert recording.returncode == 0
    assert json.loads(printed) == {"requests": 3, "file": str(file)}
    assert sorted(zip(trace.prompts.tolist(), trace.outputs.tolist(), strict=True)) == [
        (3, 1),
        (4, 2),
        (5, 9),
    ]
    with file.open(newline="") as lines:
        tenants = {row["prompt_tokens"]: row["tenant"] for row in csv.DictReader(lines)}
    assert tenants["5"] == tenants["4"] != tenants["3"]
    assert "team" not in file.read_text()


def test_a_recording_ends_after_its_time_and_replaces_no_file(
    server: ValkeyServer, waiting: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "trace.csv"
    arguments = ("record", "--output", str(file), "--seconds", "0")
    assert read(server, *arguments) == {"requests": 0, "file": str(file)}
    refused = queue(server, *arguments)
    assert isinstance(refused.exception, UsageError)
    assert "trace.csv cannot be made" in str(refused.exception)
