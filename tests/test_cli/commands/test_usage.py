"""`headrace usage`: sums of the ledger in each form, and its export as CloudEvents."""

import asyncio
import csv
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace_cli.errors import UsageError
from headrace_cli.main import app
from headrace_cli.queues import usage_export as export
from headrace_cli.queues.usage_report import since
from headrace_common.protocol.base import QueueLimits
from headrace_common.protocol.ledger import AttemptUsage
from headrace_testing.backends import MODEL, OverRedis, make_request
from headrace_testing.queue_contract import done
from headrace_testing.threaded_server import ScriptedHandler, ThreadedServer
from headrace_testing.valkey import ValkeyServer

LIMITS = QueueLimits()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(Path(tmp_path_factory.mktemp("valkey")), appendonly=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def ledger(server: ValkeyServer) -> list[str]:
    """Two requests of alice and one of bob have ended; returns their ids."""

    async def fill() -> list[str]:
        backend = OverRedis(server.url)
        await backend.wipe()
        gateway, engine = backend.gateway(), backend.engine()
        ids = []
        for key in ("alice", "alice", "bob"):
            request = replace(make_request(), key=key, tenant="acme")
            await gateway.admit(request, LIMITS)
            (lease,) = await engine.take(1)
            usage = AttemptUsage(engine_ms=1500, kv_byte_seconds=10, cached_tokens=1)
            await engine.finish(lease.request.request_id, 1, done(5, 6), usage)
            ids.append(request.request_id)
        await backend.close()
        return ids

    return asyncio.run(fill())


def run(server: ValkeyServer, *arguments: object, fails: bool = False) -> Result:
    words = ["usage", *map(str, arguments), "--redis", server.url]
    result = CliRunner().invoke(app, words, catch_exceptions=fails)
    assert fails or result.exit_code == 0, result.output
    return result


def test_usage_is_summed_by_key(server: ValkeyServer, ledger: list[str]) -> None:
    found = run(server, "report", "--by", "key,tenant,model", "--format", "json").stdout
    assert json.loads(found) == [
        {
            "key": key,
            "tenant": "acme",
            "model": MODEL,
            "requests": requests,
            "prompt_tokens": 3 * requests,
            "cached_tokens": requests,
            "output_tokens": 2 * requests,
            "engine_seconds": 1.5 * requests,
            "kv_byte_seconds": 10 * requests,
        }
        for key, requests in (("alice", 2), ("bob", 1))
    ]


def test_each_entry_is_a_row_of_csv(server: ValkeyServer, ledger: list[str]) -> None:
    found = run(server, "report", "--entries", "--format", "csv").stdout
    rows = list(csv.DictReader(io.StringIO(found)))
    assert [row["id"] for row in rows] == ledger
    assert {row["outcome"] for row in rows} == {"finished"}


def test_a_table_names_the_day(server: ValkeyServer, ledger: list[str]) -> None:
    header, row = run(server, "report", "--by", "day").stdout.splitlines()
    assert header.split()[:2] == ["day", "requests"]
    assert datetime.fromisoformat(row.split()[0]) and row.split()[1] == "3"


def test_what_ended_before_the_time_is_left_out(server: ValkeyServer, ledger: list[str]) -> None:
    found = run(server, "report", "--since", "2999-01-01", "--format", "json").stdout
    assert json.loads(found) == []


def test_a_report_is_written_to_a_file(
    server: ValkeyServer, ledger: list[str], tmp_path: Path
) -> None:
    run(server, "report", "--format", "csv", "--output", tmp_path / "usage.csv")
    assert len((tmp_path / "usage.csv").read_text().splitlines()) == 2


def test_a_parquet_file_has_the_same_rows(
    server: ValkeyServer, ledger: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for pyarrow, which the environment of the tests lacks."""
    written: dict[Path, dict[str, list[object]]] = {}
    parquet = SimpleNamespace(write_table=lambda table, file: written.update({file: table}))
    pyarrow = SimpleNamespace(table=dict, parquet=parquet, __spec__=object())
    monkeypatch.setitem(sys.modules, "pyarrow", pyarrow)
    file = tmp_path / "usage.parquet"
    run(server, "report", "--entries", "--format", "parquet", "--output", file)
    assert written[file]["id"] == ledger
    assert written[file]["output_tokens"] == [2, 2, 2]


def test_without_pyarrow_a_message_names_it(
    server: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_cli.queues.usage_report.find_spec", lambda _: None)
    arguments = ("--format", "parquet", "--output", tmp_path / "usage.parquet")
    result = run(server, "report", *arguments, fails=True)
    assert isinstance(result.exception, UsageError)
    assert "pip install pyarrow" in str(result.exception)


@pytest.mark.parametrize(
    "wrong",
    [
        ("--by", "colour"),
        ("--format", "xml"),
        ("--format", "parquet"),
        ("--since", "soon"),
        ("--model", "unknown"),
    ],
)
def test_wrong_arguments_are_refused(server: ValkeyServer, wrong: tuple[str, str]) -> None:
    assert isinstance(run(server, "report", *wrong, fails=True).exception, UsageError)


def test_a_time_is_a_duration_a_day_or_a_moment() -> None:
    now = datetime(2026, 3, 2, 12, tzinfo=UTC)
    hour = 3_600_000
    at = int(now.timestamp() * 1000)
    assert since("2h", now) == at - 2 * hour
    assert since("2026-03-02", now) == at - 12 * hour
    assert since("2026-03-02T13:00:00+01:00", now) == at


class Collector(ThreadedServer):
    """Takes CloudEvents, after it has given `answers` with other statuses."""

    def __init__(self, *answers: int) -> None:
        super().__init__(Handler)
        self.answers = list(answers)
        self.batches: list[list[dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.posts = 0


class Handler(ScriptedHandler[Collector]):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.script.posts += 1
        status = self.script.answers.pop(0) if self.script.answers else 204
        if status == 204:
            self.script.headers.append({k.lower(): v for k, v in self.headers.items()})
            self.script.batches.append(json.loads(body))
        self.send_response(status)
        self.send_header("Location", "/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "FIRST_PAUSE", 0.001)


def test_entries_are_sent_once_as_cloudevents(
    server: ValkeyServer, ledger: list[str], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("secret\n")
    with Collector() as collector:
        for _ in range(2):
            run(
                server,
                "export",
                "--to",
                collector.address,
                "--once",
                "--token-file",
                tmp_path / "token",
            )
    (batch,) = collector.batches
    assert [event["id"] for event in batch] == ledger
    (headers,) = collector.headers
    assert headers["content-type"] == "application/cloudevents-batch+json"
    assert headers["authorization"] == "Bearer secret"
    first = batch[0]
    assert {name: first[name] for name in ("specversion", "type", "source", "subject")} == {
        "specversion": "1.0",
        "type": "headrace.request",
        "source": "headrace",
        "subject": "acme",
    }
    assert first["data"]["key"] == "alice" and first["data"]["output_tokens"] == 2
    assert datetime.fromisoformat(first["time"])


def test_a_batch_is_sent_again_until_it_is_accepted(
    server: ValkeyServer, ledger: list[str]
) -> None:
    """Also after a redirect, which is no acceptance."""
    with Collector(500, 429, 302, 400) as collector:
        run(server, "export", "--to", collector.address, "--once", "--batch", 2)
    assert [[event["id"] for event in batch] for batch in collector.batches] == [
        ledger[:2],
        ledger[2:],
    ]
    assert collector.posts == 6


def test_entries_that_were_not_acknowledged_are_sent_again(
    server: ValkeyServer, ledger: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(*_: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(export, "send", breaks)
        assert run(server, "export", "--to", "http://h", "--once", fails=True).exception
    with Collector() as collector:
        run(server, "export", "--to", collector.address, "--once")
    assert [event["id"] for batch in collector.batches for event in batch] == ledger


def test_another_group_gets_all_entries_as_well(server: ValkeyServer, ledger: list[str]) -> None:
    with Collector() as collector:
        for group in ("a", "b"):
            run(server, "export", "--to", collector.address, "--once", "--group", group)
    assert len(collector.batches) == 2


def test_a_url_without_a_scheme_is_refused(server: ValkeyServer) -> None:
    result = run(server, "export", "--to", "openmeter", fails=True)
    assert isinstance(result.exception, UsageError)
