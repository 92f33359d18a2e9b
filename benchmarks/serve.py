"""Load over HTTP against any OpenAI server: latencies and throughput as a client sees them.

Requests arrive as a Poisson process (--request-rate), or as fast as --concurrency allows. Nothing
is retried; what fails is counted by kind. Only loopback servers unless --allow-remote.
"""

import asyncio
import ipaddress
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from openai_client import Client, Server, Timeline
from workload import MAX_REQUESTS, Job, Range, arrivals, dataset_jobs, random_jobs

UNLIMITED = float("inf")
PERCENTILES = (50, 90, 99)
# Extensions of other servers than OpenAI's, best first: exact lengths, and token ids to count.
FEATURE_SETS: tuple[Mapping[str, object], ...] = (
    {"ignore_eos": True, "return_token_ids": True},
    {"ignore_eos": True},
    {},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How requests are sent. `rate` in requests a second, times in seconds.

    `warmup` requests are sent before those that are measured.
    """

    rate: float
    warmup: int
    concurrency: int
    stream: bool
    temperature: float
    seed: int
    request_timeout: float
    max_duration: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, percentiles and maximum of some values, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary | None":
        """The summary of values; None if there are none."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p99 = (_percentile(ordered, percent) for percent in PERCENTILES)
        return cls(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run. Latencies are of completed requests; tokens and requests a second of the whole run.

    `ttft_s`: send to first token. `itl_s`: between pieces of output, all requests' together.
    `tpot_s`: a request's mean time per token after its first. `e2e_s`: send to end.
    `send_lag_s`: how late requests were sent, given a rate: a busy client, or --concurrency in the
    way of the rate. `client_cpu`: the cores that the client itself used.
    """

    model: str
    requests: int
    completed: int
    errors: dict[str, int]
    short_outputs: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: Summary | None
    itl_s: Summary | None
    tpot_s: Summary | None
    e2e_s: Summary | None
    send_lag_s: Summary | None
    client_cpu: float


@dataclass(frozen=True, slots=True)
class Measured:
    """All requests of a run; `lags` are the seconds by which each was sent late, given a rate."""

    timelines: Sequence[Timeline]
    lags: Sequence[float]
    duration: float
    cpu: float


async def find_model(client: Client) -> str:
    """The first model that the server lists. Raises OSError, or ValueError where it lists none."""
    models = (await client.get("/v1/models")).get("data") or []
    if not models:
        raise ValueError("the server lists no model: name one with --model")
    return str(models[0]["id"])


async def find_features(
    client: Client, model: str, job: Job, common: Mapping[str, object]
) -> Mapping[str, object]:
    """The best of FEATURE_SETS that the server takes. Raises ConnectionError where none is."""
    probe = Job(job.prompt, 2)
    for features in FEATURE_SETS:
        timeline = await client.generate(probe.path, probe.payload(model, {**common, **features}))
        if timeline.error is None:
            return features
        if timeline.error not in ("http 400", "http 422"):
            break
    raise ConnectionError(f"the server refused a first request: {timeline.error} {timeline.detail}")


def common_fields(load: Load) -> dict[str, object]:
    """The fields that the bodies of all requests share."""
    fields: dict[str, object] = {"temperature": load.temperature, "seed": load.seed}
    if load.stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return fields


async def run_load(
    send: Callable[[Job], Awaitable[Timeline]],
    jobs: Sequence[Job],
    load: Load,
    on_end: Callable[[], object],
) -> Measured:
    """Sends all jobs and waits for them, for at most `load.max_duration`.

    What runs then is stopped and counts as `unfinished`, what was not sent as `not sent`.
    """
    slots = asyncio.Semaphore(load.concurrency)
    started, cpu = time.perf_counter(), time.process_time()
    timelines: dict[int, Timeline] = {}
    lags: list[float] = []

    async def one(number: int, job: Job) -> None:
        timelines[number] = Timeline(started=time.perf_counter(), error="unfinished")
        try:
            timelines[number] = await send(job)
        finally:
            slots.release()
            on_end()

    async def all_jobs() -> None:
        async with asyncio.TaskGroup() as group:
            due_times = arrivals(random.Random(load.seed), len(jobs), load.rate)
            for number, (job, due) in enumerate(zip(jobs, due_times, strict=True)):
                await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
                await slots.acquire()
                if load.rate != UNLIMITED:
                    lags.append(max(0.0, time.perf_counter() - started - due))
                group.create_task(one(number, job))

    try:
        await asyncio.wait_for(all_jobs(), load.max_duration)
    except TimeoutError:
        for number in range(len(jobs)):
            timelines.setdefault(number, Timeline(started=0.0, error="not sent"))
    duration = time.perf_counter() - started
    return Measured(list(timelines.values()), lags, duration, time.process_time() - cpu)


def report(model: str, jobs: Sequence[Job], measured: Measured, exact: bool) -> Report:
    """Adds a run up. `exact`: outputs were asked to have exactly their length."""
    good = [timeline for timeline in measured.timelines if timeline.error is None]
    output = sum(timeline.output_tokens for timeline in good)
    prompt = sum(timeline.prompt_tokens or 0 for timeline in good)
    errors = Counter(timeline.error for timeline in measured.timelines if timeline.error)
    wanted = sum(job.output_tokens for job in jobs)
    return Report(
        model=model,
        requests=len(jobs),
        completed=len(good),
        errors=dict(errors.most_common()),
        short_outputs=max(0, wanted - output) if exact and len(good) == len(jobs) else 0,
        duration_s=measured.duration,
        requests_per_s=len(good) / measured.duration,
        output_tokens_per_s=output / measured.duration,
        total_tokens_per_s=(output + prompt) / measured.duration,
        prompt_tokens=prompt,
        output_tokens=output,
        ttft_s=Summary.of([t.first_token - t.started for t in good if t.first_token]),
        itl_s=Summary.of([gap for t in good for gap in t.gaps]),
        tpot_s=Summary.of([tpot for t in good if (tpot := _per_token(t)) is not None]),
        e2e_s=Summary.of([t.ended - t.started for t in good]),
        send_lag_s=Summary.of(measured.lags),
        client_cpu=measured.cpu / measured.duration,
    )


def show(result: Report, console: Console) -> None:
    """The report as tables."""
    latencies = Table(title=f"{result.model}: {result.completed}/{result.requests} requests")
    latencies.add_column("milliseconds")
    for name in ("mean", "p50", "p90", "p99", "max"):
        latencies.add_column(name, justify="right")
    for title, summary in (
        ("time to first token", result.ttft_s),
        ("inter-token latency", result.itl_s),
        ("time per output token", result.tpot_s),
        ("end to end", result.e2e_s),
    ):
        if summary is not None:
            latencies.add_row(title, *(f"{1000 * v:.2f}" for v in asdict(summary).values()))
    console.print(latencies)
    console.print(
        f"{result.requests_per_s:.2f} requests/s, {result.output_tokens_per_s:.1f} output tokens/s,"
        f" {result.total_tokens_per_s:.1f} tokens/s in all, over {result.duration_s:.1f} s"
    )
    late = ""
    if result.send_lag_s is not None:
        late = f", sent {1000 * result.send_lag_s.p99:.1f} ms late (p99)"
    console.print(f"client: {result.client_cpu:.2f} cores{late}")
    for kind, count in result.errors.items():
        console.print(f"[red]{count} x {kind}[/red]")
    if result.short_outputs:
        console.print(f"[yellow]{result.short_outputs} output tokens fewer than asked[/yellow]")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks."""
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _per_token(timeline: Timeline) -> float | None:
    if timeline.first_token is None or timeline.last_token is None or timeline.output_tokens < 2:
        return None
    return (timeline.last_token - timeline.first_token) / (timeline.output_tokens - 1)


async def benchmark(
    server: Server,
    model: str | None,
    jobs: Sequence[Job],
    load: Load,
    console: Console,
) -> Report:
    """Probes the server, warms it up, then measures. Raises OSError where it does not answer.

    The last `load.warmup` + 1 jobs are for that, so that no measured prompt is in a cache.
    """
    client = Client(server, timeout=load.request_timeout)
    measured_jobs, spare = jobs[: -load.warmup - 1], jobs[-load.warmup - 1 :]
    try:
        model = model or await find_model(client)
        common = common_fields(load)
        features = await find_features(client, model, spare[0], common)
        console.print(f"server takes: {', '.join(features) or 'OpenAI fields only'}")

        async def send(job: Job) -> Timeline:
            return await client.generate(job.path, job.payload(model, {**common, **features}))

        for job in spare[1:]:
            await send(job)
        with _progress(console) as bar:
            task = bar.add_task("requests", total=len(measured_jobs))
            measured = await run_load(send, measured_jobs, load, lambda: bar.advance(task))
        return report(model, measured_jobs, measured, exact="ignore_eos" in features)
    finally:
        await client.close()


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=4,
        disable=not console.is_terminal,
    )


def _range(option: str, text: str) -> Range:
    try:
        return Range.parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option} {error}") from None


def main(
    url: Annotated[str, typer.Option(help="server, as http://127.0.0.1:8000")],
    model: Annotated[str | None, typer.Option(help="default: the first one listed")] = None,
    requests: Annotated[int, typer.Option(min=1, max=MAX_REQUESTS)] = 64,
    request_rate: Annotated[float, typer.Option(help="requests a second, Poisson")] = UNLIMITED,
    concurrency: Annotated[int, typer.Option(min=1, help="most requests in flight")] = 1024,
    prompt_tokens: Annotated[str, typer.Option(help="N or LOW-HIGH")] = "16-512",
    output_tokens: Annotated[str, typer.Option(help="N or LOW-HIGH")] = "16-128",
    dataset: Annotated[Path | None, typer.Option(help="JSONL of prompts", exists=True)] = None,
    vocab_size: Annotated[int, typer.Option(min=16, help="random token ids stay below")] = 1000,
    stream: Annotated[bool, typer.Option(help="server-sent events")] = True,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="of prompts, lengths and arrivals")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="requests before measuring")] = 2,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds a request")] = 600.0,
    max_duration: Annotated[float, typer.Option(min=0.1, help="seconds for the run")] = 1800.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the report")] = None,
    allow_remote: Annotated[bool, typer.Option(help="load a server elsewhere")] = False,
) -> None:
    """Load an OpenAI server and report latencies and throughput. OPENAI_API_KEY is sent if set."""
    console = Console()
    if request_rate <= 0:
        raise typer.BadParameter("--request-rate must be over 0")
    key = os.environ.get("OPENAI_API_KEY")
    outputs = _range("--output-tokens", output_tokens)
    prompts = _range("--prompt-tokens", prompt_tokens)
    count = requests + warmup + 1
    try:
        server = Server.parse(url, {"Authorization": f"Bearer {key}"} if key else None)
        if dataset is not None:
            jobs = dataset_jobs(dataset, count, outputs, seed=seed)
        else:
            jobs = random_jobs(count, prompts, outputs, vocab_size=vocab_size, seed=seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not allow_remote and not is_loopback(server.host):
        raise typer.BadParameter(f"{server.host} is not this machine: add --allow-remote")
    load = Load(
        rate=request_rate,
        warmup=warmup,
        concurrency=concurrency,
        stream=stream,
        temperature=temperature,
        seed=seed,
        request_timeout=timeout,
        max_duration=max_duration,
    )
    try:
        result = uvloop.run(benchmark(server, model, jobs, load, console))
    except (OSError, ValueError) as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(2) from None
    show(result, console)
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if result.errors else 0)


if __name__ == "__main__":
    typer.run(main)
