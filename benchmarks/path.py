"""Measures the path between client and engine, with an engine that only emits tokens.

    python benchmarks/path.py [--streams 16 256] [--rate 2000] [--sealed] [--json FILE]

Real processes on loopback: Valkey with its append-only file, one gateway, an engine without a model
that keeps the whole protocol. CPU figures are the processes' own CPU time; latencies are wall-clock
times and need an idle machine.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace_common.text.checkpoint import DEMO_MODEL
from headrace_common.text.tokenizer import Tokenizer
from queue_path.emitter import Emission, Emitted, emit
from queue_path.processes import MODEL, Server, gateway, valkey
from queue_path.protocol_load import Load, work
from queue_path.sealing import new_keys_file
from queue_path.streams import Started, Stream, read_streams

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
PARTS = ("streams", "full", "requests", "shard")
Figures = dict[str, float]
TICK = 1 / os.sysconf("SC_CLK_TCK")  # the resolution of the kernel's CPU accounting, s


@dataclass(frozen=True, slots=True)
class Bench:
    """The settings that all measurements share."""

    redis: Server
    gateway: Server
    token: int
    sealing_keys_file: Path | None = None

    @contextmanager
    def emitting(self, interval: float, together: int = 1) -> Iterator["Emitting"]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        emission = Emission(
            redis_url=self.redis.url,
            model=MODEL,
            token=self.token,
            interval=interval,
            together=together,
            slots=max(1024, together),
            sealing_keys_file=self.sealing_keys_file,
        )
        process = context.Process(target=emit, args=(emission, theirs))
        process.start()
        theirs.close()  # a process that dies is noticed by the end of its pipe
        assert ours.recv() == "ready"
        assert process.pid is not None
        emitting = Emitting(Server(process.pid, ""))
        try:
            yield emitting
        finally:
            ours.send("stop")
            (emitting.emitted,) = ours.recv()
            process.join()

    def read(
        self,
        endpoint: str,
        bodies: Sequence[dict[str, Any]],
        concurrency: int,
        started: Callable[[], None] = lambda: None,
    ) -> list[Stream]:
        streams = read_streams(self.gateway.url, PATHS[endpoint], bodies, concurrency, started)
        refused = next((stream.status for stream in streams if stream.status != 200), None)
        if refused is not None:
            raise RuntimeError(f"the gateway refused a request with status {refused}")
        return streams

    def decode(
        self, endpoint: str, streams: int, tokens: int, emitting: "Emitting"
    ) -> tuple[list[Stream], "Cost"]:
        """Runs streams that are all read at once; measures the cost after each has its first
        token."""
        cost = Cost(self, emitting)
        bodies = [body(endpoint, tokens)] * streams
        return self.read(endpoint, bodies, streams, Started(streams, cost.begin)), cost


class Emitting:
    emitted: Emitted

    def __init__(self, engine: Server) -> None:
        self.engine = engine


class Cost:
    """CPU and wall seconds since its creation or the last `begin`."""

    def __init__(self, bench: Bench, emitting: Emitting) -> None:
        self._processes = (bench.gateway, bench.redis, emitting.engine)
        self.begin()

    def begin(self) -> None:
        self._start = self._now()

    def _now(self) -> list[float]:
        return [time.monotonic(), *(process.cpu_seconds() for process in self._processes)]

    def of(self, count: int, what: str) -> Figures:
        """The cost divided by `count`."""
        _, gateway_s, redis_s, emitter_s = map(float.__sub__, self._now(), self._start)
        return {
            f"gateway_us_per_{what}": 1e6 * gateway_s / count,
            f"redis_us_per_{what}": 1e6 * redis_s / count,
            f"emitter_us_per_{what}": 1e6 * emitter_s / count,
        }

    def seconds(self) -> float:
        return time.monotonic() - self._start[0]


def body(endpoint: str, tokens: int) -> dict[str, Any]:
    prompt = {"prompt": "Once upon a time"}
    if endpoint == "chat":
        prompt = {"messages": [{"role": "user", "content": "Once upon a time"}]}  # type: ignore[dict-item]
    return {"model": MODEL, **prompt, "max_tokens": tokens, "stream": True}


def streaming(bench: Bench, streams: int, rate: float, seconds: float) -> Figures:
    """Runs streams that together get `rate` tokens per second; measures the latencies of hops."""
    interval = streams / rate
    tokens = max(2, round(seconds / interval))
    with bench.emitting(interval, streams) as emitting:
        done, cost = bench.decode("completions", streams, tokens, emitting)
        costs = cost.of(streams * tokens, "token")
    hops = sorted(_hops(done, emitting.emitted))
    total = streams * tokens
    return {
        "streams": streams,
        "tokens_per_second": rate,
        "bytes_per_token": sum(one.received for one in done) / total,
        "missed_tokens": total - sum(len(one.arrivals) for one in done),
        "incomplete_streams": sum(not one.complete for one in done),
        "hop_ms_p50": statistics.median(hops) / 1e6,
        "hop_ms_p99": hops[int(0.99 * len(hops))] / 1e6,
        **costs,
    }


def _hops(streams: Sequence[Stream], emitted: Emitted) -> Iterator[int]:
    """Nanoseconds from the engine's write of a token to the client's read, without the first
    token."""
    for stream in streams:
        first = emitted.first[stream.request_id]
        for index, arrival in enumerate(stream.arrivals):
            if index:
                yield arrival - emitted.steps[first + index]


def saturated(bench: Bench, endpoint: str, streams: int, tokens: int) -> Figures:
    """Measures what a streamed token costs the gateway, with an engine that emits as fast as it
    can."""
    with bench.emitting(0.0, streams) as emitting:
        done, cost = bench.decode(endpoint, streams, tokens, emitting)
        wall, costs = cost.seconds(), cost.of(streams * tokens, "token")
    total = streams * tokens
    return {
        "streams": streams,
        "tokens_per_second": total / wall,
        "tokens_per_event": total / sum(one.events for one in done),
        "bytes_per_token": sum(one.received for one in done) / total,
        "missed_tokens": total - sum(len(one.arrivals) for one in done),
        "incomplete_streams": sum(not one.complete for one in done),
        **costs,
    }


def requests(bench: Bench, count: int, concurrency: int) -> Figures:
    """Measures what a request with one output token costs: connection, tokenisation, queue and
    outcome."""
    with bench.emitting(0.0) as emitting:
        bench.read("completions", [body("completions", 1)] * 32, 8)
        cost = Cost(bench, emitting)
        bench.read("completions", [body("completions", 1)] * count, concurrency)
        costs = cost.of(count, "request")
        wall = cost.seconds()
    return {
        "requests_per_second": count / wall,
        "requests_per_gateway_core": 1e6 / costs["gateway_us_per_request"],
        **costs,
    }


def first_token(bench: Bench, count: int) -> Figures:
    """Measures what the path adds to the time to first token, with one client and an engine that
    answers at once."""

    with bench.emitting(0.0):
        bench.read("chat", [body("chat", 1)] * count, 1)
        streams = bench.read("chat", [body("chat", 1)] * count, 1)
    found = sorted((stream.arrivals[0] - stream.sent) / 1e6 for stream in streams)
    return {"ttft_ms_p50": statistics.median(found), "ttft_ms_p99": found[int(0.99 * len(found))]}


def shard(redis: Server, count: int, processes: int, sealing: Path | None) -> Figures:
    """Measures how many requests the Redis of one shard can carry, without HTTP."""
    load = Load(
        redis_url=redis.url,
        model="load",
        requests=count // processes,
        sealing_keys_file=sealing,
    )
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(load,)) for _ in range(processes)]
    cpu, begun = redis.cpu_seconds(), time.monotonic()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    used, wall = max(TICK, redis.cpu_seconds() - cpu), time.monotonic() - begun
    return {
        "requests_per_second_here": count / wall,
        "redis_us_per_request": 1e6 * used / count,
        "requests_per_redis_core": count / used,
    }


def token_of_one_letter() -> int:
    """A token that is a complete text, so that each token is an event."""
    tokenizer = Tokenizer.load(DEMO_MODEL)
    return tokenizer.encode("a", add_special_tokens=False)[-1]


@contextmanager
def running_bench(
    *, sealed: bool = False, more: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Bench]:
    """Starts Valkey and a gateway; `more` are further settings of the gateway."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = stack.enter_context(valkey(folder))
        sealing = new_keys_file(folder) if sealed else None
        running = stack.enter_context(gateway(redis.url, folder, sealing, more))
        yield Bench(redis, running, token_of_one_letter(), sealing)


def measure(options: argparse.Namespace) -> dict[str, Figures]:
    with running_bench(sealed=options.sealed) as bench:
        results: dict[str, Figures] = {}
        if "streams" in options.only:
            for streams in options.streams:
                results[f"{streams} streams"] = streaming(
                    bench, streams, options.rate, options.seconds
                )
        if "full" in options.only:
            for endpoint in PATHS:
                results[f"full speed, {endpoint}"] = saturated(
                    bench, endpoint, options.streams[-1], options.tokens
                )
        if "requests" in options.only:
            results["first token"] = first_token(bench, options.first_tokens)
            results["requests"] = requests(bench, options.requests, options.concurrency)
        if "shard" in options.only:
            results["shard"] = shard(
                bench.redis, options.shard_requests, options.processes, bench.sealing_keys_file
            )
        return results


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 256], help="at once")
    parser.add_argument("--rate", type=float, default=2000.0, help="tokens/s of all streams")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the run at that rate")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream at full speed")
    parser.add_argument("--requests", type=int, default=2000, help="of one token each")
    parser.add_argument("--concurrency", type=int, default=32, help="of those requests")
    parser.add_argument("--first-tokens", type=int, default=200, help="measured one by one")
    parser.add_argument("--shard-requests", type=int, default=4000, help="without HTTP")
    parser.add_argument("--processes", type=int, default=2, help="that send those")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--sealed", action="store_true", help="prompts and answers, in Redis")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    results = measure(options)
    table = Table("measured", "figure", "value")
    for name, figures in results.items():
        for figure, value in figures.items():
            table.add_row(name, figure, f"{value:,.2f}")
    Console(width=100).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
