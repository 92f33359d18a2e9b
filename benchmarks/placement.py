"""Compares placement of requests with a plain shared queue, by the queue's rules in virtual time.

    PYTHONPATH=tests/support python benchmarks/placement.py \\
        [--engines 16] [--slots 32] [--load 0.85] [--json FILE]

The queue is MemoryBackend, which a test compares with the scripts; the placement is the gateway's.
Engines are slots with an LRU cache of prompt prefixes. The prefix of each prompt is drawn from a
Zipf distribution. A run is deterministic.
"""

import argparse
import json
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headrace_cli.bench.arrivals import poisson
from headrace_common.protocol.base import EngineStatus, Placement, QueueLimits
from headrace_common.protocol.prefix_routing import placement_of
from headrace_common.sampling.params import SamplingParams
from headrace_common.wire.messages import GenerateRequest
from headrace_operator.simulation.events import NEVER, EventQueue
from headrace_testing.memory_queue.backend import MemoryBackend
from headrace_testing.memory_queue.records import Taken
from headrace_testing.memory_queue.shards import Shard

MODEL = "m"
LIMITS = QueueLimits(max_requests=10**9, max_tokens=10**12)
NEVER_MS = 10**12
PREFIX_TOKENS = 128
UNLIMITED = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The engines and the load of a simulation.

    `load` is a share of the engines' capacity when every prompt is cached. `decode` is the mean of
    an exponential distribution, `prefill` the time of a prefix that is not cached, in seconds.
    `cached` is the number of prefixes in an engine's cache.
    """

    engines: int = 16
    slots: int = 32
    prefixes: int = 200
    cached: int = 25
    zipf: float = 1.0
    load: float = 0.85
    decode: float = 8.0
    prefill: float = 0.8
    tenants: int = 1
    requests: int = 12_000
    seed: int = 0

    @property
    def rate(self) -> float:
        """Arrivals per second."""
        return self.load * self.engines * self.slots / self.decode


@dataclass(frozen=True, slots=True)
class Method:
    """A method of placement. `hold` is how many seconds a request waits for its engine."""

    name: str
    placed: bool = True
    bounded: bool = True
    hold: float = 0.1


METHODS = (
    Method("shared queue alone", placed=False),
    Method("strict", bounded=False, hold=UNLIMITED),
    Method("bounded load", hold=UNLIMITED),
    Method("stealing", bounded=False),
    Method("bounded load and stealing"),
)


@dataclass(slots=True)
class Engine:
    """Slots and an LRU cache of prompt prefixes."""

    name: str
    slots: int
    cached: int
    running: int = 0
    woken_at: float = -1.0
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def room(self) -> int:
        return self.slots - self.running

    def hit(self, prefix: int) -> bool:
        """Returns whether a prefix was cached; adds it to the cache."""
        known = prefix in self.cache
        self.cache[prefix] = None
        self.cache.move_to_end(prefix)
        if len(self.cache) > self.cached:
            self.cache.popitem(last=False)
        return known

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(
            engine_id=self.name,
            model=MODEL,
            max_model_len=4096,
            running=self.running,
            capacity=self.slots,
            kv_utilization=0.0,
            tokens_per_second=0.0,
            last_step_age=0.0,
            draining=False,
            version="",
        )


class Fleet:
    """Engines that take from one queue in virtual time.

    Subclasses admit requests, and say with `_seconds` how long an engine has one that it starts.
    """

    def __init__(self, engines: Sequence[Engine], seed: int) -> None:
        self._events = EventQueue()
        self._random = random.Random(seed)
        self._backend = MemoryBackend(lambda: self._events.now)
        self._shard: Shard = self._backend.shard(MODEL)
        self._engines = engines
        self._statuses = [engine.status for engine in engines]
        self._came: dict[str, float] = {}
        self._waits: list[float] = []
        self._placed: Counter[bool | None] = Counter()

    def _run(self) -> None:
        while self._events.next_time < NEVER:
            self._events.run_next()

    def _queue(self, request: GenerateRequest, placement: Placement | None) -> None:
        self._came[request.request_id] = self._events.now
        self._backend.admit(request, "g", LIMITS, None, False, placement, left=math.inf)
        # All engines with room are woken, and any of them may be first.
        for engine in self._random.sample(self._engines, len(self._engines)):
            self._take(engine)

    def _take(self, engine: Engine) -> None:
        if not engine.room or not any(len(queue) for queue in self._shard.waiting.values()):
            return
        turn = self._backend.take(self._shard, engine.name, engine.room, None)
        for one in turn.taken:
            self._start(engine, one)
        if turn.free_at < UNLIMITED and turn.free_at != engine.woken_at:
            engine.woken_at = turn.free_at
            self._events.at(turn.free_at, self._take, engine)

    def _start(self, engine: Engine, one: Taken) -> None:
        self._waits.append(self._events.now - self._came.pop(one.request_id))
        self._placed[one.placed] += 1
        engine.running += 1
        end = self._events.now + self._seconds(engine, one.request_id)
        self._events.at(end, self._end, engine, one.request_id)

    def _seconds(self, engine: Engine, request_id: str) -> float:
        raise NotImplementedError

    def _end(self, engine: Engine, request_id: str) -> None:
        engine.running -= 1
        del self._shard.records[request_id]
        self._take(engine)

    def _summary(self) -> dict[str, float]:
        """Waits in ms without the first fifth, in which caches fill, and the shares of requests by
        where they were taken."""
        waits = sorted(self._waits[len(self._waits) // 5 :])
        total = sum(self._placed.values())
        return {
            "wait_ms_p50": 1000 * waits[len(waits) // 2],
            "wait_ms_p99": 1000 * waits[len(waits) * 99 // 100],
            "wait_ms_max": 1000 * waits[-1],
            "placed": self._placed[True] / total,
            "stolen": self._placed[False] / total,
        }


class Run(Fleet):
    """One simulation: a method of placement with a scene."""

    def __init__(self, scene: Scene, method: Method) -> None:
        engines = [Engine(f"engine-{n}", scene.slots, scene.cached) for n in range(scene.engines)]
        super().__init__(engines, scene.seed)
        self._scene, self._method = scene, method
        self._prefixes: dict[str, int] = {}
        self._hits: list[bool] = []

    def __call__(self) -> dict[str, float]:
        """Returns the hit rate, waits in ms, and the shares of requests by where they were
        taken."""
        scene = self._scene
        weights = [1 / (rank + 1) ** scene.zipf for rank in range(scene.prefixes)]
        prefixes = self._random.choices(range(scene.prefixes), weights, k=scene.requests)
        times = poisson(self._random, scene.rate)
        for prefix, at in zip(prefixes, times, strict=False):
            self._events.at(at, self._admit, prefix, rank=1)  # sorted after ends at the same time
        self._run()
        hits = self._hits[len(self._hits) // 5 :]
        return {"hit_rate": sum(hits) / len(hits), **self._summary()}

    def _admit(self, prefix: int) -> None:
        request = make_request(
            len(self._prefixes), (prefix,) * PREFIX_TOKENS, f"t{prefix % self._scene.tenants}"
        )
        self._prefixes[request.request_id] = prefix
        self._queue(request, self._placement(request))

    def _placement(self, request: GenerateRequest) -> Placement | None:
        if not self._method.placed:
            return None
        placement = placement_of(
            request,
            self._statuses,
            prefix_tokens=PREFIX_TOKENS,
            load_factor=1.25,
            hold_ms=int(self._method.hold * 1000),
        )
        if self._method.bounded or placement is None:
            return placement
        # Without a bound, this engine may take all of the work.
        (best, *_) = placement.candidates
        return replace(placement, candidates=(replace(best, capacity=10**9),), capacity=1)

    def _seconds(self, engine: Engine, request_id: str) -> float:
        hit = engine.hit(self._prefixes[request_id])
        self._hits.append(hit)
        seconds = self._random.expovariate(1 / self._scene.decode)
        return seconds + (0.0 if hit else self._scene.prefill)


def make_request(number: int, prompt: tuple[int, ...], tenant: str = "t") -> GenerateRequest:
    return GenerateRequest(
        request_id=f"0.{number}",
        model=MODEL,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=16, seed=1),
        created_ms=0,
        deadline_ms=NEVER_MS,
        tenant=tenant,
    )


def compare(scene: Scene, methods: Sequence[Method] = METHODS) -> dict[str, dict[str, float]]:
    """The figures of each method, by its name."""
    return {method.name: Run(scene, method)() for method in methods}


def table(scene: Scene, figures: dict[str, dict[str, float]]) -> Table:
    made = Table(title=f"{scene.engines} engines of {scene.slots}, load {scene.load:.0%}")
    for heading in ("", "hit rate", "wait p50", "p99", "most", "placed", "stolen"):
        made.add_column(heading, justify="right" if heading else "left")
    for name, row in figures.items():
        waits = [f"{row[f'wait_ms_{which}']:,.0f} ms" for which in ("p50", "p99", "max")]
        shares = [f"{row[which]:.0%}" for which in ("placed", "stolen")]
        made.add_row(name, f"{row['hit_rate']:.2f}", *waits, *shares)
    return made


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    standard = Scene()
    for name in ("engines", "slots", "prefixes", "cached", "requests", "tenants", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(standard, name))
    parser.add_argument("--load", type=float, nargs="+", default=[0.5, 0.85, 1.05])
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    options = vars(arguments(given))
    loads, file = options.pop("load"), options.pop("json")
    results = {}
    for load in loads:
        scene = replace(Scene(**options), load=load)
        results[f"{load:g}"] = figures = compare(scene)
        Console().print(table(scene, figures))
    if file is not None:
        file.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
