"""`headrace bench` against a small OpenAI server in this file, over real sockets."""

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace_cli.bench.arrivals import Arrivals, arrival_times, poisson, read_trace
from headrace_cli.bench.bench import BenchConfig, Pace, Prompts, Run
from headrace_cli.bench.client import Client, Server, Timeline
from headrace_cli.bench.report import Report, Slo, Summary
from headrace_cli.bench.workload import (
    Job,
    Normal,
    Prefixes,
    Range,
    Sizes,
    TokenIds,
    Words,
    dataset_jobs,
    parse_lengths,
    synthetic_jobs,
)
from headrace_testing.in_process import headrace


class TinyServer:
    """Streams `max_tokens` tokens an answer. `refuses` names fields that it does not know."""

    def __init__(self) -> None:
        self.refuses: set[str] = set()
        self.failures: dict[int, str] = {}
        self.counts_tokens = True
        self.key: str | None = None
        self.tokens_per_word, self.tokens_per_chat = 1, 0
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
        if self.key and f"Authorization: Bearer {self.key}".encode() not in head:
            writer.write(_json(401, {"error": {"message": "no key"}}))
            return
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
            writer.write(_json(200, {"choices": [{"text": "x"}], "usage": self._usage(body)}))
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
            # Cut in the middle, because events do not end where packets do.
            writer.write(_chunk(data[:9]))
            await writer.drain()
            writer.write(_chunk(data[9:]))
        if failure == "error":
            writer.write(_chunk(_event({"error": {"code": "internal_error"}})))
        writer.write(_chunk(_event({"choices": [], "usage": self._usage(body)})))
        if failure != "no end":
            writer.write(_chunk(b"data: [DONE]\n\n"))
        writer.write(b"0\r\n\r\n")

    def _usage(self, body: dict[str, Any]) -> dict[str, int]:
        words = sum(len(message["content"].split()) for message in body.get("messages", ()))
        chat = self.tokens_per_chat + self.tokens_per_word * words
        return {"prompt_tokens": chat if words else 3, "completion_tokens": body["max_tokens"]}


@asynccontextmanager
async def tiny_server() -> AsyncIterator[tuple[TinyServer, Server]]:
    tiny = TinyServer()
    listening = await asyncio.start_server(tiny.accept, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with listening:
        yield tiny, Server.parse(f"http://127.0.0.1:{port}/v1")
    await asyncio.gather(*tiny.tasks)


def config(server: Server, *, prompts: Any = None, pace: Any = None, **changes: Any) -> BenchConfig:
    lengths = {"prompts": Range(4, 8), "outputs": Range(5, 9), "vocab_size": 100, "seed": 1}
    return BenchConfig(
        url=f"http://{server.host}:{server.port}",
        prompts=Prompts(**{**lengths, **(prompts or {})}),
        pace=Pace(**{"concurrency": 4, "requests": 12, **(pace or {})}),
        timeout=changes.pop("timeout", 30.0),
        **changes,
    )


async def measure(config: BenchConfig) -> Report:
    result, _ = await Run(config, Console(quiet=True)).measure()
    return result


@pytest.mark.parametrize("counts_tokens", [True, False])
async def test_a_run_counts_every_request_and_token(counts_tokens: bool) -> None:
    async with tiny_server() as (tiny, server):
        tiny.counts_tokens = counts_tokens
        result = await measure(config(server))
    wanted = sum(body["max_tokens"] for body in tiny.requests[1:])
    assert (result.model, result.requests, result.completed) == ("tiny", 12, 12)
    assert (result.errors, result.short_outputs) == ({}, 0)
    assert (result.output_tokens, result.prompt_tokens) == (wanted, 36)
    assert result.ttft_s and result.itl_s and result.tpot_s and result.e2e_s
    assert result.ttft_s.p50 <= result.e2e_s.max
    assert 0 < result.in_flight <= 4
    assert len(tiny.requests) == 13  # and one to probe the server
    assert tiny.requests[-1]["ignore_eos"] is True


async def test_concurrency_is_kept_and_connections_are_reused() -> None:
    async with tiny_server() as (tiny, server):
        tiny.gate = asyncio.Event()
        run = asyncio.create_task(measure(config(server, pace={"concurrency": 3, "requests": 20})))
        for _ in range(3):
            await tiny.held.acquire()
        tiny.gate.set()
        await run
    assert tiny.most_active == 3
    assert tiny.connections <= 4


async def test_fields_that_a_server_refuses_are_left_out() -> None:
    async with tiny_server() as (tiny, server):
        tiny.refuses = {"return_token_ids", "ignore_eos"}
        result = await measure(config(server, pace={"requests": 2}))
    assert result.completed == 2
    assert not tiny.refuses & tiny.requests[-1].keys()


async def test_failures_are_counted_by_kind_and_not_retried() -> None:
    async with tiny_server() as (tiny, server):
        tiny.failures = {2: "busy", 3: "hang up", 4: "error", 5: "no end", 6: "busy"}
        result = await measure(config(server, pace={"concurrency": 1, "requests": 8}))
    assert result.errors == {
        "http 429": 2,
        "connection lost": 1,
        "error internal_error": 1,
        "truncated": 1,
    }
    assert result.completed == 3
    assert len(tiny.requests) == 9


async def test_nothing_is_sent_after_the_duration() -> None:
    async with tiny_server() as (tiny, server):
        pace = {"requests": None, "duration": 1.0, "rate": 10.0, "arrivals": Arrivals.CONSTANT}
        result = await measure(config(server, pace=pace))
    assert result.requests == result.completed == 10
    assert result.send_lag_s is not None


async def test_a_trace_gives_times_and_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_seconds,prompt_tokens,output_tokens\n7.1,5,6\n7.0,3,4\n")
    async with tiny_server() as (tiny, server):
        pace = {"requests": None, "concurrency": None, "trace": trace}
        result = await measure(config(server, pace=pace, warmup=1))
    lengths = [(len(body["prompt"]), body["max_tokens"]) for body in tiny.requests]
    assert lengths == [(3, 2), (3, 4), (3, 4), (5, 6)]  # probe, warm-up, then the trace
    assert result.completed == 2
    assert result.duration_s >= 0.1


async def test_goodput_counts_the_requests_within_the_slo() -> None:
    async with tiny_server() as (tiny, server):
        tiny.failures = {3: "busy"}
        kept = await measure(config(server, pace={"concurrency": 1}, slo=Slo(ttft=60.0)))
        missed = await measure(config(server, slo=Slo(e2e=1e-9)))
    assert kept.goodput is not None and missed.goodput is not None
    assert (kept.goodput.requests, kept.goodput.share) == (11, 11 / 12)
    assert missed.goodput.requests == 0


async def test_a_request_times_out() -> None:
    async with tiny_server() as (tiny, server):
        tiny.gate = asyncio.Event()
        result = await measure(config(server, pace={"requests": 1}, timeout=0.2))
        tiny.gate.set()
    assert result.errors == {"timeout": 1}


async def test_answers_without_a_stream_are_measured_end_to_end() -> None:
    async with tiny_server() as (_, server):
        result = await measure(config(server, stream=False))
    assert result.completed == 12
    assert result.ttft_s is None and result.e2e_s is not None
    assert result.output_tokens > 0


async def test_warm_up_prompts_are_not_measured_again() -> None:
    async with tiny_server() as (tiny, server):
        await measure(config(server, pace={"requests": 3}, warmup=2))
    prompts = [tuple(request["prompt"]) for request in tiny.requests]
    assert len(prompts) == len(set(prompts)) == 6


async def test_chats_have_as_many_words_as_the_server_counts_tokens() -> None:
    async with tiny_server() as (tiny, server):
        tiny.tokens_per_word, tiny.tokens_per_chat = 2, 10
        prompts = {"prompts": Range(110, 110), "chat": True}
        result = await measure(config(server, prompts=prompts, pace={"requests": 3}))
    assert result.prompt_tokens == 3 * 110
    assert len(tiny.requests[-1]["messages"][0]["content"].split()) == 50


async def test_an_unreachable_server_is_an_error() -> None:
    async with tiny_server() as (_, server):
        pass
    client = Client(server, timeout=5)
    with pytest.raises(OSError):
        await client.get("/v1/models")
    assert (await client.generate("/v1/completions", {})).error == "connection refused"


def test_arrivals_are_poisson_and_repeatable() -> None:
    times, again = (list(islice(poisson(random.Random(3), 50.0), 20_000)) for _ in range(2))
    assert times == again
    gaps = [late - early for early, late in zip(times, times[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.02, rel=0.03)
    assert variance == pytest.approx(0.02**2, rel=0.1)
    assert set(islice(poisson(random.Random(3), float("inf")), 5)) == {0.0}


@pytest.mark.parametrize(
    ("kind", "times"),
    [(Arrivals.CONSTANT, [0.0, 0.5, 1.0, 1.5, 2.0]), (Arrivals.BURST, [0.0, 0.0, 1.0, 1.0, 2.0])],
)
def test_arrivals_are_evenly_spaced_or_in_bursts(kind: Arrivals, times: list[float]) -> None:
    assert list(islice(arrival_times(kind, random.Random(0), 2.0, burst=2), 5)) == times


@pytest.mark.parametrize(
    "text",
    [
        '{"timestamp": 2000, "input_length": 7, "output_length": 0, "hash_ids": [1]}\n'
        '{"timestamp": 500, "input_length": 9, "output_length": 3}\n',
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:05.5000000,7,0\n2023-11-16 18:17:04.0000000,9,3\n",
        "Timestamp,Model,Request tokens,Response tokens\n3.5,GPT-4,7,0\n2,GPT-4,9,3\n",
    ],
    ids=["Mooncake", "Azure", "BurstGPT"],
)
def test_published_traces_are_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    read = [(request.at, request.sizes) for request in read_trace(path)]
    assert read == [(0.0, Sizes(9, 3)), (1.5, Sizes(7, 1))]


@pytest.mark.parametrize(
    "text", ["a,b\n1,2\n", '{"timestamp": "x", "input_length": 1, "output_length": 1}', ""]
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"trace\.csv"):
        read_trace(path)


def test_percentiles_are_those_of_statistics() -> None:
    values = [random.Random(1).random() for _ in range(10)] + [1.0, 2.0]
    assert Summary.of(list(range(101))) == Summary(50.0, 50.0, 90.0, 95.0, 99.0, 100)
    assert Summary.of([]) is None
    assert Summary.of(values) == Summary.of(sorted(values))


def test_an_slo_bounds_each_latency() -> None:
    timeline = Timeline(started=0.0, first_token=0.5, last_token=1.5, ended=1.6, output_tokens=11)
    assert Slo.parse("ttft:500ms, tpot:0.1s") == Slo(ttft=0.5, tpot=0.1)
    assert Slo.parse("ttft:500ms,tpot:100ms,e2e:2s").met_by(timeline)
    assert not any(
        Slo.parse(text).met_by(timeline) for text in ("ttft:499ms", "tpot:99ms", "e2e:1.5s")
    )


@pytest.mark.parametrize("text", ["", "ttft", "ttft:5", "ttft:-1ms", "speed:1s"])
def test_a_bad_slo_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        Slo.parse(text)


def test_shared_beginnings_are_as_long_and_as_many_as_asked() -> None:
    sizes = [Sizes(5, 1)] * 40
    completions = list(synthetic_jobs(TokenIds(100), sizes, Prefixes(3, 20), seed=1))
    beginnings = {job.prompt[:20] for job in completions}
    assert len(beginnings) == 3
    assert {len(job.prompt) for job in completions} == {25}
    chats = list(synthetic_jobs(Words(), sizes, Prefixes(2, 20), seed=1))
    assert len({json.dumps(job.prompt[0]) for job in chats}) == 2
    assert all(job.is_chat and len(job.prompt) == 2 for job in chats)
    assert len({job.prompt for job in synthetic_jobs(TokenIds(100), sizes, seed=1)}) == 40


def test_a_dataset_gives_texts_ids_and_chats(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows: list[dict[str, object]] = [
        {"prompt": "hello", "output_tokens": 3},
        {"prompt": [1, 2]},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    jobs = list(islice(dataset_jobs(path, Range(7, 7), chat=None, seed=0), 6))
    assert {job.output_tokens for job in jobs if job.prompt == "hello"} == {3}
    chat = next(job for job in jobs if job.is_chat)
    assert chat.path == "/v1/chat/completions"
    assert chat.payload("m", {})["messages"] == ({"role": "user", "content": "hi"},)


def test_share_gpt_conversations_are_asked_by_their_first_turn(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
    path.write_text(json.dumps([{"id": "a", "conversations": turns}]))
    (text,) = islice(dataset_jobs(path, Range(7, 7), chat=None, seed=0), 1)
    (chat,) = islice(dataset_jobs(path, Range(7, 7), chat=True, seed=0), 1)
    assert text == Job("hello", 7)
    assert chat.prompt == ({"role": "user", "content": "hello"},)


@pytest.mark.parametrize(
    "line", ["[]", "{}", "x", '{"prompt": ""}', '{"prompt": "a", "output_tokens": 0}']
)
def test_a_bad_line_of_a_dataset_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n' + line)
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2"):
        dataset_jobs(path, Range(1, 1), chat=None, seed=0)


def test_messages_are_not_sent_as_a_completion(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    with pytest.raises(ValueError, match="messages cannot be sent as a completion"):
        dataset_jobs(path, Range(1, 1), chat=False, seed=0)


@pytest.mark.parametrize("text", ["0", "9-3", "a", "3-b", "0,5", "9,-1", "nan,1"])
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_lengths(text)


def test_lengths_are_a_number_a_range_or_a_mean_with_its_deviation() -> None:
    assert parse_lengths("7") == Range(7, 7)
    assert parse_lengths("16-512") == Range(16, 512)
    assert parse_lengths("256,64") == Normal(256, 64)
    rng = random.Random(1)
    drawn = [Normal(10, 20).draw(rng) for _ in range(2000)]
    assert min(drawn) == 1
    assert 60 < max(drawn) < 100


async def test_the_command_prints_a_table_and_writes_its_files(tmp_path: Path) -> None:
    report, picture = tmp_path / "report.json", tmp_path / "picture.png"
    async with tiny_server() as (_, server):
        done = await run_command(
            f"--url=http://127.0.0.1:{server.port}",
            "--requests=5",
            "--rate=200",
            "--output-tokens=4",
            "--slo=e2e:60s",
            f"--out={report}",
            f"--png={picture}",
        )
    assert done.code == 0, done
    assert "time to first token" in done.out and "output tokens/s" in done.out
    assert "5 of 5 (100.0%)" in done.out
    written = json.loads(report.read_text())
    assert (written["completed"], written["output_tokens"]) == (5, 20)
    assert written["send_lag_s"]["p99"] >= 0
    assert [each["output_tokens"] for each in written["timelines"]] == [4] * 5
    assert max(each["e2e_s"] for each in written["timelines"]) == written["e2e_s"]["max"]
    assert picture.read_bytes().startswith(b"\x89PNG")


async def test_with_json_only_the_report_is_on_standard_output() -> None:
    async with tiny_server() as (tiny, server):
        tiny.failures = {4: "busy"}
        done = await run_command(f"--url=http://127.0.0.1:{server.port}", "--json", "--requests=5")
    assert json.loads(done.out)["errors"] == {"http 429": 1}
    assert done.code == 1


async def test_an_interrupted_run_reports_what_it_has() -> None:
    async with tiny_server() as (tiny, server):
        tiny.gate = asyncio.Event()
        url = f"--url=http://127.0.0.1:{server.port}"
        process = await start_command(url, "--json", "--warmup=0", "--concurrency=3")
        for _ in range(3):
            await tiny.held.acquire()
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
        tiny.gate.set()
    assert json.loads(out)["errors"] == {"unfinished": 3}
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--url=http://127.0.0.1:1"], 1, "http://127.0.0.1:1: Connection refused. --url names"),
        (["--url=tcp://x"], 2, "must be http(s)://host[:port]"),
        (["--rate=0"], 2, "--rate 0 is out of range"),
        (["--slo=fast"], 2, "--slo must be of ttft, tpot, e2e"),
        (["--prompt-tokens=0"], 2, "--prompt-tokens must be N, LOW-HIGH or MEAN,DEVIATION"),
        (["--rate=2", "--trace=x"], 2, "--trace and --rate exclude each other"),
        (["--dataset=x", "--prefixes=2"], 2, "--dataset and --prefixes exclude each other"),
        (["--trace=absent"], 2, "absent: cannot be read (No such file or directory)"),
        (["--out=absent/report.json"], 2, "the folder of absent/report.json does not exist"),
        (["--extra-body=[]"], 2, "--extra-body must be a JSON object"),
        (["--extra-body={a"], 2, "--extra-body must be a JSON object"),
    ],
)
def test_errors_are_one_message(arguments: list[str], code: int, message: str) -> None:
    done = headrace("bench", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1


async def test_a_missing_key_is_asked_for() -> None:
    async with tiny_server() as (tiny, server):
        tiny.key = "secret"
        url = f"--url=http://127.0.0.1:{server.port}"
        refused = await run_command(url)
        done = await run_command(url, "--api-key=secret", "--requests=2")
    assert "give it with --api-key" in refused.notes
    assert (refused.code, done.code) == (1, 0)


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    notes: str


async def start_command(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace_cli", "bench", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"COLUMNS": "200", "TERM": "dumb"},
    )


async def run_command(*arguments: str) -> Done:
    process = await start_command(*arguments)
    out, notes = await process.communicate()
    assert process.returncode is not None
    return Done(process.returncode, out.decode(), notes.decode())


def _head(status: int, content_type: str, length: str) -> bytes:
    return f"HTTP/1.1 {status} Word\r\nContent-Type: {content_type}\r\n{length}\r\n\r\n".encode()


def _json(status: int, body: object) -> bytes:
    data = json.dumps(body).encode()
    return _head(status, "application/json", f"Content-Length: {len(data)}") + data


def _event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
