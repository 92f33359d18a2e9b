"""The command line of the faults; runs each fault on its kind of Redis."""

import argparse
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, product
from pathlib import Path

from headrace_common.wire.keys import MAX_SHARDS
from headrace_testing.forked import Forge
from headrace_testing.processes import Starter
from headrace_testing.redis_sets import GuardedSentinelSet, SentinelSet
from headrace_testing.stack import RedisServers
from headrace_testing.valkey import ValkeyServer

from .cases import Workload
from .faults import ELSEWHERE, FAULTS
from .scene import Fault, run
from .world import SHARDS, ProxiedServer, WholeCluster, World

PROGRAM = "python -m tests.test_chaos"
FAULTY_PROCESSES = "headrace_testing.chaos.faulty_processes"
_LAST_SEED = 999_999  # that is drawn
_SERVERS: Mapping[str, Callable[[Path], RedisServers]] = {
    "valkey": ValkeyServer,
    "proxied": ProxiedServer,
    "sentinel": SentinelSet,
    "guarded": GuardedSentinelSet,
    "cluster": WholeCluster,
}
# Their masters change; a second fail over would have to wait for the first one's rest.
_ONCE = ("sentinel", "guarded", "cluster")
Kind = tuple[str, int]  # of a world: of its Redis, and how many shards its queue has


def drawn_shards(seed: int) -> int:
    """The number of shards of the queue for a seed.

    Each three successive seeds have 1, 2 and 3 shards, in a changing order, so that the number does
    not depend on what else follows from the seed.
    """
    turn, number = divmod(seed - 1, SHARDS)
    return 1 + (number + turn) % SHARDS


class Worlds:
    """A world of each kind, made when it is first needed or earlier. Used by one thread."""

    def __init__(self, workload: Workload, folder: Path, start: Starter) -> None:
        self._workload = workload
        self._folder = folder
        self._start = start
        self._worlds: dict[Kind, World] = {}
        self._coming: dict[Kind, Future[World]] = {}
        self._makers = ThreadPoolExecutor(1)
        self._count = count(1)

    def prepare(self, kinds: Iterable[Kind]) -> None:
        """Makes worlds and starts their processes, one after the other, while faults run."""
        for kind in kinds:
            self._coming[kind] = self._makers.submit(self._make_ready, kind)

    def run(self, fault: Fault, seed: int, shards: int) -> list[str]:
        """Runs a fault and returns the mistakes; a world with mistakes is not used again."""
        try:
            return self._play(fault, seed, (fault.servers, shards))
        except AssertionError as error:
            return [f"it broke off: {error}"]

    def _play(self, fault: Fault, seed: int, kind: Kind) -> list[str]:
        world = self._take(kind)
        mistakes = ["it broke off"]
        try:
            mistakes = run(fault, world, self._workload, seed)
        finally:
            if mistakes or fault.spoils or fault.servers in _ONCE:
                world.close()
            else:
                self._worlds[kind] = world
        return mistakes

    def _take(self, kind: Kind) -> World:
        if (coming := self._coming.pop(kind, None)) is not None:
            return coming.result()
        return self._worlds.pop(kind, None) or self._make(kind)

    def _make_ready(self, kind: Kind) -> World:
        world = self._make(kind)
        try:
            world.restore()
        except AssertionError:
            world.close()
            raise
        return world

    def _make(self, kind: Kind) -> World:
        name, shards = kind
        folder = self._folder / f"{name}-{next(self._count)}"
        folder.mkdir(parents=True)
        servers = _SERVERS[name](folder / "redis")
        return World(self._workload.checkpoint, folder, self._start, servers, shards)

    def close(self) -> None:
        self._makers.shutdown(cancel_futures=True)
        came = [each for each in self._coming.values() if not each.cancelled()]
        made = [each.result() for each in came if each.exception() is None]
        for world in (*self._worlds.values(), *made):
            world.close()


@contextmanager
def worlds(workload: Workload, folder: Path, start: Starter) -> Iterator[Worlds]:
    made = Worlds(workload, folder, start)
    try:
        yield made
    finally:
        made.close()


def repeat(fault: str, seed: int, shards: int) -> str:
    """Returns the command that runs a fault again."""
    return f"{PROGRAM} --fault {fault} --seed {seed} --shards {shards}"


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.list:
        _print(_table())
        return 0
    from .workload import make_workload  # needs torch, which takes seconds

    chosen = list(FAULTS) if options.fault == "all" else [options.fault]
    folder = Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    logging.basicConfig(filename=folder / "faults.log")
    failed = 0
    with worlds(make_workload(folder), folder, Forge(FAULTY_PROCESSES).start) as made:
        for seed, name in _plan(options, chosen):
            shards = options.shards or drawn_shards(seed)
            begun = time.monotonic()
            mistakes = made.run(FAULTS[name], seed, shards)
            failed += bool(mistakes)
            verdict = "FAILED" if mistakes else f"ok in {time.monotonic() - begun:.1f} s"
            _print([f"{name} seed {seed} shards {shards}: {verdict}", *mistakes])
            if mistakes:
                _print([f"again: {repeat(name, seed, shards)}", f"logs: {folder}"])
    return 1 if failed else 0


def _plan(options: argparse.Namespace, faults: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The seeds and faults to run: every fault with each seed, or random ones until the time is
    over."""
    if options.minutes is None:
        seeds = range(options.seed, options.seed + options.runs)
        yield from product(seeds, faults)
        return
    end = time.monotonic() + 60 * options.minutes
    drawn = random.Random(options.seed)
    while time.monotonic() < end:
        yield drawn.randint(1, _LAST_SEED), drawn.choice(faults)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, description="Break Headrace under load.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--fault", choices=[*FAULTS, "all"], help="which one")
    what.add_argument("--list", action="store_true", help="print the faults there are")
    parser.add_argument("--seed", type=int, default=1, help="what is random follows from it")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--runs", type=int, default=1, help="how many seeds, from that one")
    drawn = "draw faults and seeds for so long, instead of taking each in turn"
    length.add_argument("--minutes", type=float, help=drawn)
    numbers = range(1, MAX_SHARDS + 1)
    shards_help = "of the queue, instead of what the seed draws"
    parser.add_argument("--shards", type=int, choices=numbers, metavar="N", help=shards_help)
    return parser


def _table() -> Iterator[str]:
    for name, fault in FAULTS.items():
        yield f"{name:15}{fault.title}{' (make test-chaos)' if fault.slow else ''}"
    for name, (title, files) in ELSEWHERE.items():
        yield f"{name:15}{title}: tests/{', tests/'.join(files)}"


def _print(lines: Iterator[str] | Sequence[str]) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()
