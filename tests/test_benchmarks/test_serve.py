"""The load benchmark against a small OpenAI server of this file's own, over real sockets."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import serve
from openai_client import Client, Server
from workload import Job, Range, arrivals, dataset_jobs, random_jobs

SERVE = Path(serve.__file__)


class TinyServer:
    """Streams `max_tokens` tokens an answer. `refuses` names fields that it does not know."""

    def __init__(self) -> None:
        self.refuses: set[str] = set()
        self.failures: dict[int, str] = {}
        self.counts_tokens = True
        self.requests: list[dict[str, Any]] = []
        self.connections = 0
        self.active = self.most_active = 0
        self.gate: asyncio.Event | None = None
        self.held = asyncio.Semaphore(0)
        self.tasks: list[asyncio.Task[None]] = []

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.append(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) and not writer.is_closing():
                await self._answer(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if head.startswith(b"GET"):
            writer.write(_json(200, {"data": [{"id": "tiny"}]}))
            return
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.requests.append(body)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        if self.gate is not None and body["max_tokens"] != 2:  # 2: the client's probe
            self.held.release()
            await self.gate.wait()
        await self._complete(body, writer)
        self.active -= 1

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        failure = self.failures.get(len(self.requests))
        if self.refuses & body.keys():
            writer.write(_json(400, {"error": {"message": "unknown field"}}))
        elif failure == "busy":
            writer.write(_json(429, {"error": {"message": "queue full"}}))
        elif failure == "hang up":
            writer.write(_head(200, "text/event-stream", "Transfer-Encoding: chunked"))
            writer.close()
        elif not body.get("stream"):
            usage = {"prompt_tokens": 3, "completion_tokens": body["max_tokens"]}
            writer.write(_json(200, {"choices": [{"text": "x"}], "usage": usage}))
        else:
            await self._stream(body, writer, failure)

    async def _stream(
        self, body: dict[str, Any], writer: asyncio.StreamWriter, failure: str | None
    ) -> None:
        writer.write(_head(200, "text/event-stream", "Transfer-Encoding: chunked"))
        writer.write(_chunk(b": keep-alive\n\n"))
        for number in range(body["max_tokens"]):
            event: dict[str, Any] = {"index": 0, "text": "x"}
            if self.counts_tokens and body.get("return_token_ids"):
                event |= {"token_ids": [number], "text": ""}
            data = _event({"choices": [event]})
            # Cut in the middle: events do not end where packets do.
            writer.write(_chunk(data[:9]))
            await writer.drain()
            writer.write(_chunk(data[9:]))
        if failure == "error":
            writer.write(_chunk(_event({"error": {"code": "internal_error"}})))
        usage = {"prompt_tokens": 3, "completion_tokens": body["max_tokens"]}
        writer.write(_chunk(_event({"choices": [], "usage": usage})))
        if failure != "no end":
            writer.write(_chunk(b"data: [DONE]\n\n"))
        writer.write(b"0\r\n\r\n")


@asynccontextmanager
async def tiny_server() -> AsyncIterator[tuple[TinyServer, Server]]:
    tiny = TinyServer()
    listening = await asyncio.start_server(tiny.accept, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with listening:
        yield tiny, Server.parse(f"http://127.0.0.1:{port}/v1")
    await asyncio.gather(*tiny.tasks)


def a_load(**changes: Any) -> serve.Load:
    defaults: dict[str, Any] = {
        "rate": serve.UNLIMITED,
        "warmup": 0,
        "concurrency": 4,
        "stream": True,
        "temperature": 0.0,
        "seed": 0,
        "request_timeout": 30.0,
        "max_duration": 30.0,
    }
    return serve.Load(**{**defaults, **changes})


def some_jobs(count: int) -> list[Job]:
    return random_jobs(count + 1, Range(4, 8), Range(5, 9), vocab_size=100, seed=1)


async def measure(server: Server, jobs: list[Job], load: serve.Load) -> serve.Report:
    return await serve.benchmark(server, None, jobs, load, Console(quiet=True))


@pytest.mark.parametrize("counts_tokens", [True, False])
async def test_a_run_counts_every_request_and_token(counts_tokens: bool) -> None:
    jobs = some_jobs(12)
    async with tiny_server() as (tiny, server):
        tiny.counts_tokens = counts_tokens
        result = await measure(server, jobs, a_load())
    wanted = sum(job.output_tokens for job in jobs[:12])
    assert (result.model, result.requests, result.completed) == ("tiny", 12, 12)
    assert (result.errors, result.short_outputs) == ({}, 0)
    assert (result.output_tokens, result.prompt_tokens) == (wanted, 36)
    assert result.ttft_s and result.itl_s and result.tpot_s and result.e2e_s
    assert result.ttft_s.p50 <= result.e2e_s.max
    assert len(tiny.requests) == 13  # and one to probe
    assert tiny.requests[-1]["ignore_eos"] is True


async def test_concurrency_is_kept_and_connections_are_reused() -> None:
    async with tiny_server() as (tiny, server):
        tiny.gate = asyncio.Event()
        run = asyncio.create_task(measure(server, some_jobs(20), a_load(concurrency=3)))
        for _ in range(3):
            await tiny.held.acquire()
        tiny.gate.set()
        await run
    assert tiny.most_active == 3
    assert tiny.connections <= 4


async def test_fields_that_a_server_refuses_are_left_out() -> None:
    async with tiny_server() as (tiny, server):
        tiny.refuses = {"return_token_ids", "ignore_eos"}
        result = await measure(server, some_jobs(2), a_load())
    assert result.completed == 2
    assert not tiny.refuses & tiny.requests[-1].keys()


async def test_failures_are_counted_by_kind_and_not_retried() -> None:
    async with tiny_server() as (tiny, server):
        tiny.failures = {2: "busy", 3: "hang up", 4: "error", 5: "no end", 6: "busy"}
        result = await measure(server, some_jobs(8), a_load(concurrency=1))
    assert result.errors == {
        "http 429": 2,
        "connection lost": 1,
        "error internal_error": 1,
        "truncated": 1,
    }
    assert result.completed == 3
    assert len(tiny.requests) == 9


async def test_a_run_ends_in_time() -> None:
    async with tiny_server() as (tiny, server):
        tiny.gate = asyncio.Event()
        result = await measure(server, some_jobs(3), a_load(concurrency=2, max_duration=0.2))
        tiny.gate.set()
    assert result.errors == {"unfinished": 2, "not sent": 1}


async def test_a_request_times_out() -> None:
    async with tiny_server() as (tiny, server):
        tiny.gate = asyncio.Event()
        result = await measure(server, some_jobs(1), a_load(request_timeout=0.2))
        tiny.gate.set()
    assert result.errors == {"timeout": 1}


async def test_answers_without_a_stream_are_measured_end_to_end() -> None:
    async with tiny_server() as (_, server):
        result = await measure(server, some_jobs(3), a_load(stream=False))
    assert result.completed == 3
    assert result.ttft_s is None and result.e2e_s is not None
    assert result.output_tokens > 0


async def test_warm_up_prompts_are_not_measured_again() -> None:
    jobs = random_jobs(6, Range(4, 8), Range(5, 9), vocab_size=100, seed=1)
    async with tiny_server() as (tiny, server):
        await measure(server, jobs, a_load(warmup=2))
    prompts = [tuple(request["prompt"]) for request in tiny.requests]
    assert len(prompts) == len(set(prompts)) == 6


async def test_an_unreachable_server_is_an_error() -> None:
    async with tiny_server() as (_, server):
        pass
    client = Client(server, timeout=5)
    with pytest.raises(OSError):
        await client.get("/v1/models")
    assert (await client.generate("/v1/completions", {})).error == "connection refused"


def test_arrivals_are_poisson_and_repeatable() -> None:
    times = list(arrivals(random.Random(3), 20_000, 50.0))
    assert times == list(arrivals(random.Random(3), 20_000, 50.0))
    gaps = [late - early for early, late in zip(times, times[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.02, rel=0.03)
    assert variance == pytest.approx(0.02**2, rel=0.1)
    assert set(arrivals(random.Random(3), 5, serve.UNLIMITED)) == {0.0}


def test_percentiles_are_those_of_statistics() -> None:
    values = [random.Random(1).random() for _ in range(10)] + [1.0, 2.0]
    summary = serve.Summary.of(list(range(101)))
    assert summary == serve.Summary(50.0, 50.0, 90.0, 99.0, 100)
    assert serve.Summary.of([]) is None
    assert serve.Summary.of(values) == serve.Summary.of(sorted(values))


def test_a_dataset_gives_texts_ids_and_chats(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows: list[dict[str, object]] = [
        {"prompt": "hello", "output_tokens": 3},
        {"prompt": [1, 2]},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    jobs = dataset_jobs(path, 6, Range(7, 7), seed=0)
    assert len(jobs) == 6
    assert {job.output_tokens for job in jobs if job.prompt == "hello"} == {3}
    chat = next(job for job in jobs if job.is_chat)
    assert chat.path == "/v1/chat/completions"
    assert chat.payload("m", {})["messages"] == ({"role": "user", "content": "hi"},)


@pytest.mark.parametrize(
    "line", ["[]", "{}", '{"prompt": ""}', '{"prompt": "a", "output_tokens": 0}']
)
def test_a_bad_line_of_a_dataset_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n' + line)
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2"):
        dataset_jobs(path, 1, Range(1, 1), seed=0)


@pytest.mark.parametrize("text", ["0", "9-3", "a", "3-b"])
def test_a_bad_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Range.parse(text)


def test_a_range_is_one_number_or_two() -> None:
    assert (Range.parse("7"), Range.parse("16-512")) == (Range(7, 7), Range(16, 512))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.8.8", "::1"])
def test_loopback_is_known(host: str) -> None:
    assert serve.is_loopback(host)


async def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    async with tiny_server() as (_, server):
        code, output = await run_command(
            f"--url=http://127.0.0.1:{server.port}",
            "--requests=5",
            "--request-rate=200",
            "--output-tokens=4",
            f"--json={report}",
        )
    assert code == 0, output
    assert "time to first token" in output and "output tokens/s" in output
    written = json.loads(report.read_text())
    assert (written["completed"], written["output_tokens"]) == (5, 20)
    assert written["send_lag_s"]["p99"] >= 0


async def test_the_command_loads_no_server_elsewhere() -> None:
    code, output = await run_command("--url=http://192.0.2.1:8000")
    assert code == 2
    assert "--allow-remote" in output


async def run_command(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SERVE), *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"COLUMNS": "200", "TERM": "dumb"},
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


def _head(status: int, content_type: str, length: str) -> bytes:
    return f"HTTP/1.1 {status} Word\r\nContent-Type: {content_type}\r\n{length}\r\n\r\n".encode()


def _json(status: int, body: object) -> bytes:
    data = json.dumps(body).encode()
    return _head(status, "application/json", f"Content-Length: {len(data)}") + data


def _event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
