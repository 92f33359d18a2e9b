"""Measures tenants' shares of one model on several real engines: one greedy tenant and nine modest.

    PYTHONPATH=tests/support python benchmarks/fairness.py \\
        [--engines 4] [--shards 3] [--seconds 150] [--json FILE]

Real processes on loopback: Valkey, a gateway with API keys, engines with a tiny random model that
pause after each step, so that they are the bottleneck. Every tenant keeps a constant number of
streams open, the greedy one many, so that all wait all the time.
For each window of 30 s it prints Jain's index of the tokens that the tenants were given, output
counted twice as the queue does, over their weights.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from headrace_testing import paced
from headrace_testing.api_keys import KeyBook
from headrace_testing.checkpoints import save_checkpoint
from headrace_testing.stack import MODEL, Stack
from virtual_time.measures import jain

WINDOW = 30.0
OUTPUT = 2
SLOTS = 4
PAUSE_MS = 50
SEQUENCE = 512


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant with `streams` open streams, and the lengths of its prompts and answers."""

    name: str
    weight: float
    streams: int
    prompt: int
    output: int


def tenants(modest: int) -> list[Tenant]:
    """One greedy tenant, and modest ones of which the first has twice the weight of the others."""
    greedy = Tenant("greedy", 1.0, streams=80, prompt=64, output=120)
    weights = [2.0] + [1.0] * (modest - 1)
    return [
        greedy,
        *(
            Tenant(f"modest-{n}", weight, round(8 * weight), prompt=16 + 8 * n, output=24 + 4 * n)
            for n, weight in enumerate(weights)
        ),
    ]


class Shares:
    """The tokens that each tenant was given, by window."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.windows: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def add(self, tenant: str, tokens: int) -> None:
        self.windows[int((time.monotonic() - self._began) // WINDOW)][tenant] += tokens


async def _stream(
    client: httpx.AsyncClient, headers: dict[str, str], tenant: Tenant, shares: Shares, number: int
) -> None:
    """Sends one request, and counts its tokens as they come."""
    body = {
        "model": MODEL,
        "prompt": [(number * 7 + at) % 100 + 1 for at in range(tenant.prompt)],
        "max_tokens": tenant.output,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    known = 0
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            made = json.loads(line[6:])["usage"]["completion_tokens"]
            if made and not known:
                shares.add(tenant.name, tenant.prompt)
            shares.add(tenant.name, OUTPUT * (made - known))
            known = made


async def _load(url: str, book: KeyBook, asked: list[Tenant], seconds: float) -> Shares:
    shares, end = Shares(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)

    async def keep_open(client: httpx.AsyncClient, tenant: Tenant, first: int) -> None:
        headers, number = book.headers(tenant.name), first
        while time.monotonic() < end:
            await _stream(client, headers, tenant, shares, number)
            number += 1000

    async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits) as client:
        loads = [
            asyncio.create_task(keep_open(client, tenant, number))
            for tenant in asked
            for number in range(tenant.streams)
        ]
        _, left = await asyncio.wait(loads, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for load in left:
            load.cancel()
        for outcome in await asyncio.gather(*loads, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
    return shares


class Figures:
    """The shares of one window."""

    def __init__(self, asked: list[Tenant], tokens: Counter[str]) -> None:
        self.tokens = {tenant.name: tokens[tenant.name] for tenant in asked}
        self.jain = jain([tokens[tenant.name] / tenant.weight for tenant in asked])


def measure(folder: Path, engines: int, shards: int, seconds: float, modest: int) -> list[Figures]:
    """Returns the figures of each whole window."""
    asked, book = tenants(modest), KeyBook(folder / "keys.yaml")
    for tenant in asked:
        book.add(tenant.name, tenant=tenant.name, tenant_weight=tenant.weight)
    model = save_checkpoint(folder / "model", "llama", max_position_embeddings=SEQUENCE)
    stack = Stack(model, folder, env=paced.ENVIRONMENT, queue_shards=shards)
    try:
        for _ in range(engines):
            stack.add_engine("--max-num-seqs", str(SLOTS), *paced.flags(PAUSE_MS))
        gateway = stack.add_gateway("--api-keys-file", str(book.path))
        stack.await_engines(engines)
        shares = asyncio.run(_load(gateway.url, book, asked, seconds))
    finally:
        stack.close()
    whole = sorted(window for window in shares.windows if (window + 1) * WINDOW <= seconds)
    return [Figures(asked, shares.windows[window]) for window in whole]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--shards", type=int, default=3, help="shards of the model's queue")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--modest", type=int, default=9, help="modest tenants")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        windows = measure(Path(folder), args.engines, args.shards, args.seconds, args.modest)
    table = Table("from", "Jain's index", "greedy", "modest: least", "most", box=None)
    for number, window in enumerate(windows):
        greedy, *others = window.tokens.values()
        table.add_row(
            f"{number * WINDOW:.0f} s", f"{window.jain:.4f}", *map(str, (greedy, min(others))),
            str(max(others)),
        )  # fmt: skip
    Console().print(table)
    if args.json is not None:
        figures = [{"jain": window.jain, "tokens": window.tokens} for window in windows]
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
