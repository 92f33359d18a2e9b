"""Measures how many requests a Redis Cluster of three masters carries for one model, by the number
of shards of the model's queue; and how much CPU an idle engine uses.

Requests go through the queue without HTTP: they are admitted, taken, kept by two heartbeats,
answered in frames and finished. There are several gateways and engines, since the streams of each
are on one node of the cluster.

    python benchmarks/queue_shards.py --shards 1 3 6 --json results.json
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis
import uvloop

from headrace_cli.servers.valkey import find_server
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_common.protocol.redis.gateway import RedisGatewayQueue
from headrace_common.protocol.redis.sharded_engine import ShardedEngineQueue
from headrace_common.protocol.shards import ShardAssigner
from headrace_common.wire.keys import SLOTS, new_incarnation
from queue_path.processes import free_port
from queue_path.protocol_load import BATCH, LIMITS, Load, carry_out, new_request, status_of

MODEL = "load"
MASTERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedLoad(Load):
    """The load of one process: its requests go through `pairs` gateways and `pairs` engines."""

    shards: int
    pairs: int


def work(load: ShardedLoad) -> None:
    uvloop.run(_work(load))


async def _work(load: ShardedLoad) -> None:
    """Runs in a process: engines wait for what gateways admit, and end when nothing is left."""
    admitted = asyncio.Event()
    engines = [asyncio.create_task(_serve(load, admitted)) for _ in range(load.pairs)]
    gateways = [
        RedisGatewayQueue(_connect(load.redis_url), new_incarnation("g")) for _ in range(load.pairs)
    ]
    await asyncio.gather(*(gateway.start() for gateway in gateways))
    assigner, rng = ShardAssigner(), random.Random(7)
    for _ in range(load.requests // BATCH):
        shards = [assigner.assign(MODEL, "default", load.shards) for _ in range(BATCH)]
        new = (new_request(load, shard) for shard in shards)
        await asyncio.gather(*(rng.choice(gateways).admit(request, LIMITS) for request in new))
    admitted.set()
    await asyncio.gather(*engines, *(gateway.close() for gateway in gateways))


async def _serve(load: ShardedLoad, admitted: asyncio.Event) -> None:
    engine = _engine(load.redis_url, load.shards)
    await engine.start()
    while True:
        last = admitted.is_set()
        if leases := await engine.take(BATCH):
            await carry_out(load, engine, leases)
            continue
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.wait(), 0.5)
            continue
        if last:
            break
    await engine.close()


def _connect(url: str) -> Connection:
    return Connection(ConnectionConfig(url=url))


def _engine(url: str, shards: int) -> ShardedEngineQueue:
    connection, name = _connect(url), new_incarnation("e")
    return ShardedEngineQueue(
        lambda shard: RedisEngineQueue(connection, name, MODEL, shard=shard), shards
    )


@dataclass(frozen=True, slots=True)
class Cluster:
    """Masters that each have an equal part of the slots."""

    ports: Sequence[int]
    pids: Sequence[int]

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.ports[0]}"

    def cpu(self) -> list[float]:
        """CPU seconds, in user and kernel mode, that each master has used."""
        times = [psutil.Process(pid).cpu_times() for pid in self.pids]
        return [float(each.user + each.system) for each in times]

    def commands(self) -> int:
        return sum(
            int(_ask(port, "INFO", "stats")["total_commands_processed"]) for port in self.ports
        )


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Starts a cluster with append-only files and without replicas."""
    with contextlib.ExitStack() as stack:
        ports, buses = [free_port() for _ in range(MASTERS)], [free_port() for _ in range(MASTERS)]
        pids = [
            stack.enter_context(_master(folder / str(port), port, bus))
            for port, bus in zip(ports, buses, strict=True)
        ]
        bounds = [SLOTS * number // MASTERS for number in range(MASTERS + 1)]
        for number, port in enumerate(ports):
            _ask(port, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            _ask(port, "CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
            _ask(ports[0], "CLUSTER", "MEET", "127.0.0.1", port, buses[number])
        for port in ports:
            _until(lambda port=port: _is_whole(port))  # type: ignore[misc]
        yield Cluster(ports, pids)


@contextlib.contextmanager
def _master(folder: Path, port: int, bus: int) -> Iterator[int]:
    folder.mkdir()
    options = {
        "port": port,
        "bind": "127.0.0.1",
        "dir": folder,
        "appendonly": "yes",
        "save": "",
        "loglevel": "nothing",
        "cluster-enabled": "yes",
        "cluster-port": bus,
        "cluster-announce-ip": "127.0.0.1",
    }
    command = [str(find_server().path)]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    server = psutil.Popen(command)
    try:
        _until(lambda: _ask(port, "PING") is not None)
        yield server.pid
    finally:
        server.terminate()
        server.wait()


def _ask(port: int, *command: str | int) -> dict[str, str]:
    with redis.Redis(port=port, decode_responses=True) as client:
        found: dict[str, str] = client.execute_command(*command)
        return found


def _is_whole(port: int) -> bool:
    info = _ask(port, "CLUSTER INFO")
    return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(MASTERS)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        time.sleep(0.02)
    raise TimeoutError("the cluster did not come up")


def measure_load(nodes: Cluster, shards: int, options: argparse.Namespace) -> dict[str, float]:
    """Measures the CPU time of the nodes for each request; the busiest node is the limit."""
    each = options.requests // options.processes
    load = ShardedLoad(
        redis_url=nodes.url, model=MODEL, requests=each, shards=shards, pairs=options.pairs
    )
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(load,)) for _ in range(options.processes)]
    before = nodes.cpu()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    used = [after - first for after, first in zip(nodes.cpu(), before, strict=True)]
    return {
        "redis_us_per_request": 1e6 * sum(used) / options.requests,
        "busiest_node_part": max(used) / sum(used),
        "requests_per_second_of_busiest_core": options.requests / max(used),
    }


def measure_idle_engine(nodes: Cluster, shards: int, seconds: float) -> dict[str, float]:
    """Measures the engine's side of a queue without requests, which only sends heartbeats."""

    async def run() -> None:
        engine = _engine(nodes.url, shards)
        await engine.start()
        await engine.take(1)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.wait(), 3.0)
            await engine.beat((), status_of(engine, MODEL))
            await engine.reap(1)
            await engine.take(1)
        await engine.close()

    commands, cpu = nodes.commands(), time.process_time()
    uvloop.run(run())
    return {
        "engine_cpu_percent": 100 * (time.process_time() - cpu) / seconds,
        "commands_per_second": (nodes.commands() - commands) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 3, 6])
    parser.add_argument(
        "--requests", type=int, default=6144, help="requests for each number of shards"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--pairs", type=int, default=6, help="gateways, and as many engines, in a process"
    )
    parser.add_argument("--idle-seconds", type=float, default=15.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for shards in options.shards:
        with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as nodes:
            found = measure_load(nodes, shards, options) | measure_idle_engine(
                nodes, shards, options.idle_seconds
            )
        results[f"{shards} shards"] = found | {"load_average": os.getloadavg()[0]}
        for name, value in results[f"{shards} shards"].items():
            print(f"{shards} shards  {name}  {value:.6g}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
