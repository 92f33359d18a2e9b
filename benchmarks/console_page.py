"""What an open page of the console costs, and how smoothly it draws.

    PYTHONPATH=tests/support python benchmarks/console_page.py [--rounds 30] [--sequences 64]

Starts `headrace up` with the demo model and keeps it busy with as many streams as sequences. In
turns of a few seconds the stream of the live view is read and is not: what a page costs a server is
that stream. The server's processes have the machine's first core; the clients have the others, as
they are on other machines in production. Prints the ratio of tokens a second with and without.
Then Chromium shows the live view under the same load, and the frames that it drew are counted
(`make system-packages` installs it).
"""

import argparse
import asyncio
import json
import os
import random
import re
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx

from headrace_testing.browser import chromium
from headrace_testing.headrace_up import UpProcess

# Keeps the time of every frame in `frames`, in milliseconds.
COUNT_FRAMES = """() => {
    window.frames = [];
    const each = now => { window.frames.push(now); requestAnimationFrame(each); };
    requestAnimationFrame(each);
}"""
SETTLE_S = 0.5
GENERATED = re.compile(rb'"completion_tokens":(\d+)')


@dataclass(frozen=True, slots=True)
class Pair:
    """Tokens a second of two neighbouring turns: without and with a watcher."""

    alone: float
    watched: float


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames a second, and the 99th percentile of the time between two, in milliseconds."""

    per_second: float
    gap_p99_ms: float


class Load:
    """Streams that are sent again as they end; `tokens` is what they all have received."""

    def __init__(self, url: str, sequences: int) -> None:
        self.tokens = 0
        self._url = url
        self._sequences = sequences

    @asynccontextmanager
    async def running(self) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, limits=limits, timeout=60) as client:
            async with asyncio.TaskGroup() as group:
                streams = [
                    group.create_task(self._stream(client, number))
                    for number in range(self._sequences)
                ]
                await asyncio.sleep(5)
                yield client
                for stream in streams:
                    stream.cancel()

    async def _stream(self, client: httpx.AsyncClient, number: int) -> None:
        body: dict[str, Any] = {
            "model": "headrace-demo",
            "prompt": f"{number} " + "Once upon a time there was a river. " * 4,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        lengths = random.Random(number)
        while True:
            # So short that streams begin and end at all times, and turns are alike.
            body["max_tokens"], before = lengths.randint(16, 112), 0
            async with client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for chunk in response.aiter_bytes():
                    if found := GENERATED.findall(chunk):
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


async def pairs(load: Load, rounds: int, seconds: float) -> list[Pair]:
    found = []
    async with load.running() as client:
        for number in range(rounds):
            speed = {}
            for watched in (number % 2 == 0, number % 2 == 1):
                async with watcher(client) if watched else nullcontext():
                    await asyncio.sleep(SETTLE_S)
                    speed[watched] = await load.speed(seconds)
            found.append(Pair(alone=speed[False], watched=speed[True]))
    return found


def frames(url: str, load: Load, seconds: float) -> Frames:
    """What a browser draws while the load runs."""

    async def keep_busy() -> None:
        async with load.running():
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
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=2, help="of one turn")
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
        load = Load(up.url, options.sequences)
        found = asyncio.run(pairs(load, options.rounds, options.seconds))
        smooth = frames(up.url, load, 20)
    ratios = [pair.watched / pair.alone for pair in found]
    low, _, high = quantiles(ratios, n=4)
    print(f"{median(pair.alone for pair in found):.0f} tokens/s without a watcher")
    print(
        f"with / without, median of {len(ratios)}: {median(ratios):.3f} ({low:.3f} to {high:.3f})"
    )
    print(f"{smooth.per_second:.1f} frames a second, 99 % within {smooth.gap_p99_ms:.1f} ms")
    if options.json:
        rounds = [asdict(pair) for pair in found]
        options.json.write_text(json.dumps({"frames": asdict(smooth), "rounds": rounds}) + "\n")


if __name__ == "__main__":
    main()
