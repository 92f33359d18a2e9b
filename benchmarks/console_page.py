"""What an open page of the console costs, and how smoothly it draws.

    PYTHONPATH=tests/support python benchmarks/console_page.py [--rounds 80] [--sequences 64]

Starts `headrace up` with the demo model and keeps it busy with as many streams as sequences, which
all begin together and decode until one of them ends; then the next ones begin. In turns of a second
the stream of the live view is read and is not: what a page costs a server is that stream. A round
has four turns, without, with, with, without (or the other way round), so that the growing context
costs both alike. The server's processes have the machine's first core; the clients have the others,
as they are on other machines in production. Prints the ratio of tokens a second with and without.
Then Chromium shows the live view under the same load, and the frames that it drew are counted
(`make system-packages` installs it).
"""

import argparse
import asyncio
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles, stdev

import httpx

from headrace_testing.browser import chromium
from headrace_testing.headrace_up import UpProcess

# Keeps the time of every frame in `frames`, in milliseconds.
COUNT_FRAMES = """() => {
    window.frames = [];
    const each = now => { window.frames.push(now); requestAnimationFrame(each); };
    requestAnimationFrame(each);
}"""
SETTLE_S = 0.3
GENERATED = re.compile(rb'"completion_tokens":(\d+)')
OUTPUT_TOKENS = 1500


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens a second of four neighbouring turns: two without and two with a watcher."""

    alone: float
    watched: float


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames a second, and the 99th percentile of the time between two, in milliseconds."""

    per_second: float
    gap_p99_ms: float


class Load:
    """Streams that begin together; `tokens` is what they all have received."""

    def __init__(self, url: str, sequences: int) -> None:
        self.tokens = 0
        self._url = url
        self._sequences = sequences
        self._begun = 0
        self._all_begun = asyncio.Event()
        self._streams: list[asyncio.Task[None]] = []

    @property
    def steady(self) -> bool:
        """Whether no stream has ended."""
        return not any(stream.done() for stream in self._streams)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, limits=limits, timeout=60) as client:
            async with asyncio.TaskGroup() as group:
                self._streams = [
                    group.create_task(self._stream(client, number))
                    for number in range(self._sequences)
                ]
                await self._all_begun.wait()
                yield client
                for stream in self._streams:
                    stream.cancel()

    async def _stream(self, client: httpx.AsyncClient, number: int) -> None:
        body = {
            "model": "headrace-demo",
            "prompt": f"{number} " + "Once upon a time there was a river. " * 4,
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        before = 0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for chunk in response.aiter_bytes():
                if found := GENERATED.findall(chunk):
                    if not before:
                        self._begun += 1
                        if self._begun == self._sequences:
                            self._all_begun.set()
                    self.tokens += int(found[-1]) - before
                    before = int(found[-1])

    async def speed(self, seconds: float) -> float:
        """Tokens a second, from now on."""
        loop = asyncio.get_running_loop()
        begin, before = loop.time(), self.tokens
        await asyncio.sleep(seconds)
        return (self.tokens - before) / (loop.time() - begin)


@asynccontextmanager
async def watcher(client: httpx.AsyncClient) -> AsyncIterator[None]:
    """Reads the stream of the live view."""

    async def read() -> None:
        async with client.stream("GET", "/console/live") as response:
            response.raise_for_status()
            async for _ in response.aiter_bytes():
                pass

    reading = asyncio.create_task(read())
    yield
    assert not reading.done(), "the live stream ended"
    reading.cancel()


async def measure(url: str, sequences: int, rounds: int, seconds: float) -> list[Round]:
    found: list[Round] = []
    while len(found) < rounds:
        load = Load(url, sequences)
        async with load.running() as client:
            while True:
                first = len(found) % 2 == 0
                speeds: dict[bool, float] = {False: 0, True: 0}
                for watched in (first, not first, not first, first):
                    async with watcher(client) if watched else nullcontext():
                        await asyncio.sleep(SETTLE_S)
                        speeds[watched] += await load.speed(seconds) / 2
                if not load.steady:
                    break
                found.append(Round(alone=speeds[False], watched=speeds[True]))
                print(f"round {len(found)} of {rounds}", file=sys.stderr)
    return found


def frames(url: str, sequences: int, seconds: float) -> Frames:
    """What a browser draws while the load runs."""

    async def keep_busy() -> None:
        async with Load(url, sequences).running():
            await asyncio.sleep(seconds)

    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{url}/#live")
        page.locator(".engine").first.wait_for()
        page.evaluate(COUNT_FRAMES)
        # Playwright's own event loop runs in this thread.
        with ThreadPoolExecutor(1) as threads:
            threads.submit(asyncio.run, keep_busy()).result()
        times = page.evaluate("window.frames")
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return Frames(1000 * len(gaps) / (times[-1] - times[0]), quantiles(gaps, n=100)[98])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=1, help="of one turn")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--json", type=Path, help="file to write the rounds to")
    options = parser.parse_args()
    first, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {first})
    with (
        tempfile.TemporaryDirectory() as folder,
        UpProcess(Path(folder), "--", "--max-num-seqs", str(options.sequences)) as up,
    ):
        os.sched_setaffinity(0, others or {first})
        up.until_served()
        found = asyncio.run(measure(up.url, options.sequences, options.rounds, options.seconds))
        smooth = frames(up.url, options.sequences, 20)
    logs = [math.log(each.watched / each.alone) for each in found]
    error = stdev(logs) / math.sqrt(len(logs))
    print(f"{median(each.alone for each in found):.0f} tokens/s without a watcher")
    print(
        f"with / without, geometric mean of {len(logs)} rounds: {math.exp(mean(logs)):.4f}"
        f" +- {error:.4f} (standard error)"
    )
    print(f"{smooth.per_second:.1f} frames a second, 99 % within {smooth.gap_p99_ms:.1f} ms")
    if options.json:
        rounds = [asdict(pair) for pair in found]
        options.json.write_text(json.dumps({"frames": asdict(smooth), "rounds": rounds}) + "\n")


if __name__ == "__main__":
    main()
