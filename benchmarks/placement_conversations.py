"""Compares placement by all of a prompt's blocks with placement by its first tokens.

    python benchmarks/placement_conversations.py [--engines 16] [--load 0.85] [--json FILE]

Conversations share long system prompts and part after them. As benchmarks/placement.py: the queue's
rules and the gateway's placement in virtual time. Caches are LRU lists of blocks; what is believed
of them comes from the engine's own filter, at most STALE_S late. The random scene has prompts that
share nothing. `--cost` also prints the time that a gateway takes to place one request.
"""

import argparse
import json
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from headrace_cli.bench.arrivals import poisson
from headrace_common.protocol.base import Placement
from headrace_common.protocol.kv_events import BlockFilter
from headrace_common.protocol.prefix_match import PrefixMatch
from headrace_common.protocol.prefix_routing import placement_of
from headrace_common.wire.block_hashes import block_hash, filter_bits, prefix_seed
from headrace_common.wire.messages import GenerateRequest
from headrace_engine.kv_cache.cached_blocks import CachedBlocks
from placement import PREFIX_TOKENS, Engine, Fleet, make_request

STALE_S = 1.5  # an engine's interval and a gateway's
METHODS = ("shared queue alone", "first tokens", "all blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Conversations and engines.

    Each of the `turns` of a conversation adds `turn_tokens` to its prompt, half of them the answer
    before it. The system prompt, of `system_tokens`, is one of `systems` by Zipf's law. `cached` is
    in tokens. `block_size` is larger than that of engines, so that a run takes seconds. A client
    writes for `pause` seconds; `decode` is the mean seconds of an answer, and an engine computes
    `prefill_rate` prompt tokens a second. `load` is a share of the engines' capacity without
    prefill.
    """

    engines: int = 16
    slots: int = 16
    systems: int = 40
    system_tokens: int = 2048
    turns: int = 6
    turn_tokens: int = 256
    cached: int = 131_072
    block_size: int = 64
    pause: float = 20.0
    decode: float = 8.0
    prefill_rate: float = 8000.0
    load: float = 0.85
    requests: int = 2400
    seed: int = 0


class CachingEngine(Engine):
    """An engine with an LRU cache of blocks, and what is believed of it."""

    def __init__(self, name: str, scene: Scene) -> None:
        super().__init__(name, scene.slots, scene.cached // scene.block_size)
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self._told = CachedBlocks(filter_bits(self.cached))
        self.believed = BlockFilter(self._told.bits, scene.block_size)

    def compute(self, hashes: Sequence[bytes]) -> int:
        """Returns the number of leading blocks that were cached; all of them are afterwards."""
        found = next((n for n, each in enumerate(hashes) if each not in self.blocks), len(hashes))
        for each in hashes:
            if each not in self.blocks:
                self._told.add(each)
            self.blocks[each] = None
            self.blocks.move_to_end(each)
        while len(self.blocks) > self.cached:
            self._told.remove(self.blocks.popitem(last=False)[0])
        return found

    def tell(self) -> None:
        changes = self._told.take_changes()
        self.believed.change(
            [bit for bit, is_set in changes.items() if is_set],
            [bit for bit, is_set in changes.items() if not is_set],
        )


class Run(Fleet):
    """One simulation: a method of placement with a scene."""

    def __init__(self, scene: Scene, method: str) -> None:
        self._caches = [CachingEngine(f"engine-{n}", scene) for n in range(scene.engines)]
        super().__init__(self._caches, scene.seed)
        self._scene, self._method = scene, method
        self._told_at = -STALE_S
        self._known: dict[str, tuple[GenerateRequest, int, int]] = {}
        self._seen: set[bytes] = set()
        self._tokens: list[tuple[int, int, int]] = []  # all, computed, again
        self.placing: list[float] = []  # seconds that placing a request takes

    def __call__(self) -> dict[str, float]:
        """Returns shares of prompt tokens, waits in ms, and where requests were taken."""
        scene = self._scene
        weights = [1 / (rank + 1) for rank in range(scene.systems)]
        count = scene.requests // scene.turns
        systems = self._random.choices(range(scene.systems), weights, k=count)
        rate = scene.load * scene.engines * scene.slots / scene.decode / scene.turns
        for number, at in zip(range(count), poisson(self._random, rate), strict=False):
            self._events.at(at, self._admit, number, systems[number], 1, rank=1)
        self._run()
        counted = self._tokens[len(self._tokens) // 5 :]
        prompt, computed, again = map(sum, zip(*counted, strict=True))
        return {"computed": computed / prompt, "again": again / prompt, **self._summary()}

    def _admit(self, number: int, system: int, turn: int) -> None:
        scene = self._scene
        own = scene.turns * number + scene.systems
        prompt = (system,) * scene.system_tokens
        for each in range(turn):
            prompt += (own + each,) * scene.turn_tokens
        request = make_request(scene.turns * number + turn, prompt)
        self._known[request.request_id] = (request, number, system)
        begun = time.perf_counter()
        placement = self._placement(request)
        self.placing.append(time.perf_counter() - begun)
        self._queue(request, placement)

    def _placement(self, request: GenerateRequest) -> Placement | None:
        if self._method == METHODS[0]:
            return None
        cached: Mapping[str, int] = {}
        if self._method == METHODS[2]:
            self._listen()
            match = PrefixMatch(request, {each.name: each.believed for each in self._caches})
            match.advance()
            cached = match.tokens
        return placement_of(
            request,
            self._statuses,
            prefix_tokens=PREFIX_TOKENS,
            load_factor=1.25,
            hold_ms=100,
            cached=cached,
        )

    def _listen(self) -> None:
        if self._events.now - self._told_at >= STALE_S:
            self._told_at = self._events.now
            for each in self._caches:
                each.tell()

    def _seconds(self, engine: Engine, request_id: str) -> float:
        assert isinstance(engine, CachingEngine)
        tokens = self._known[request_id][0].prompt_token_ids
        size, hashes, before = self._scene.block_size, [], prefix_seed(b"", None)
        for end in range(size, len(tokens) + 1, size):
            before = block_hash(before, tokens, (), end - size, end)
            hashes.append(before)
        computed = hashes[engine.compute(hashes) :]
        again = sum(each in self._seen for each in computed)
        self._seen.update(computed)
        self._tokens.append((len(tokens), len(computed) * size, again * size))
        decode = self._random.expovariate(1 / self._scene.decode)
        return decode + len(computed) * size / self._scene.prefill_rate

    def _end(self, engine: Engine, request_id: str) -> None:
        scene, (request, number, system) = self._scene, self._known.pop(request_id)
        turn = (len(request.prompt_token_ids) - scene.system_tokens) // scene.turn_tokens
        if turn < scene.turns:
            at = self._events.now + self._random.expovariate(1 / scene.pause)
            self._events.at(at, self._admit, number, system, turn + 1, rank=1)
        super()._end(engine, request_id)


def random_prompts(scene: Scene) -> Scene:
    """The same load without anything that prompts share."""
    tokens = scene.system_tokens + scene.turn_tokens * (scene.turns + 1) // 2
    return replace(scene, system_tokens=0, turns=1, turn_tokens=tokens)


def compare(scene: Scene, rounds: int = 1) -> dict[str, dict[str, float]]:
    """The figures of each method, by its name: medians over `rounds` seeds."""
    found: dict[str, dict[str, float]] = {}
    for method in METHODS:
        runs = [Run(replace(scene, seed=scene.seed + each), method)() for each in range(rounds)]
        found[method] = {name: median(run[name] for run in runs) for name in runs[0]}
    return found


def placing_seconds(scene: Scene, rounds: int = 3) -> dict[str, float]:
    """Median seconds of placing one request, by method, over interleaved rounds."""
    found: dict[str, list[float]] = {method: [] for method in METHODS[1:]}
    for _ in range(rounds):
        for method, medians in found.items():
            run = Run(scene, method)
            run()
            medians.append(median(run.placing))
    return {method: median(medians) for method, medians in found.items()}


def table(title: str, figures: dict[str, dict[str, float]]) -> Table:
    made = Table(title=title)
    for heading in ("", "computed", "again", "wait p50", "p99", "placed", "stolen"):
        made.add_column(heading, justify="right" if heading else "left")
    for name, row in figures.items():
        shares = [f"{row[which]:.1%}" for which in ("computed", "again")]
        waits = [f"{row[f'wait_ms_{which}']:,.0f} ms" for which in ("p50", "p99")]
        made.add_row(name, *shares, *waits, f"{row['placed']:.0%}", f"{row['stolen']:.0%}")
    return made


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    standard = Scene()
    names = ("engines", "slots", "systems", "turns", "cached", "block_size", "requests", "seed")
    for name in names:
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=getattr(standard, name)
        )
    parser.add_argument("--rounds", type=int, default=3, help="seeds, of which medians are shown")
    parser.add_argument("--load", type=float, nargs="+", default=[0.5, 0.85, 1.05])
    parser.add_argument("--cost", action="store_true", help="measure the time of placing")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    options = vars(arguments(given))
    loads, file, cost = options.pop("load"), options.pop("json"), options.pop("cost")
    rounds = options.pop("rounds")
    results: dict[str, object] = {}
    for load in loads:
        scene = Scene(**options, load=load)
        for kind, each in (("conversations", scene), ("random", random_prompts(scene))):
            results[f"{kind} {load:g}"] = figures = compare(each, rounds)
            Console().print(table(f"{kind}, load {load:.0%}", figures))
    if cost:
        scene = Scene(**options)
        for kind, each in (("conversations", scene), ("random", random_prompts(scene))):
            results[f"{kind} placing seconds"] = seconds = placing_seconds(each)
            shown = ", ".join(f"{name}: {1e6 * taken:.0f} us" for name, taken in seconds.items())
            Console().print(f"placing one request, {kind}: {shown}")
    if file is not None:
        file.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
