"""Computes what a fleet needs besides its GPUs, from the curves that scaling.py has measured.

    python benchmarks/capacity.py REPORT [--gpus 100 1000 10000] [--streams 64] [--speed 30]
        [--output 300] [--busy 0.6]

Each GPU has an engine with that many streams, each of that many tokens a second; a request has that
many output tokens. Processes are used up to the share `--busy` of a core. In each step an engine
writes one frame to each gateway that has a client of it.
"""

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from growth.curve import Curve, curve_of
from growth.gateway import RATE

MOST_STREAMS = 10_000  # of one gateway, the largest number that scaling.py measures


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU microseconds of a unit, and bytes, at the largest size that was measured; a token's
    at the measured speed of a stream that is nearest. Frames share writes, reads and replies where
    they are many, so a frame's cost is that at the largest load."""

    gateway_token: float
    gateway_request: float
    redis_request: float
    redis_frame: float
    redis_engine_second: float  # what an engine costs besides its frames
    bytes_token: float

    @classmethod
    def of(cls, curves: Mapping[str, Curve], speed: float) -> "Costs":
        """The costs where a stream has `speed` tokens/s. Raises KeyError where a curve is
        missing."""
        calm = curves["gateway, 2,000 tokens/s"].points
        _, token = min(calm, key=lambda point: abs(math.log(RATE / point[0] / speed)))
        frames = curves["Redis, by frames"].points
        (most, used), engines = frames[-1], curves["Redis, by engines"].points
        own_frame = 1e3 * _at(frames, engines[-1][0]) / engines[-1][0]  # one a second each
        return cls(
            gateway_token=token,
            gateway_request=_last(curves["gateway, by requests at once"]),
            redis_request=_last(curves["queue, by waiting requests"]),
            redis_frame=1e3 * used / most,
            redis_engine_second=max(0.0, _slope(engines) * 1e3 - own_frame),
            bytes_token=_last(curves["client's bytes"]),
        )


def _last(curve: Curve) -> float:
    return curve.points[-1][1]


def _slope(points: list[tuple[int, float]]) -> float:
    (first, low), (last, high) = points[0], points[-1]
    return (high - low) / (last - first)


def _at(points: list[tuple[int, float]], size: int) -> float:
    """The cost at a size, on a line between the points beside it; the nearest one's beyond them."""
    for (first, low), (last, high) in pairwise(points):
        if first <= size <= last:
            return low + (high - low) * (size - first) / (last - first)
    return min(points, key=lambda point: abs(point[0] - size))[1]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The demand of engines, one on each GPU."""

    gpus: int
    streams: int
    speed: float
    output: float
    busy: float

    def needs(self, costs: Costs) -> dict[str, str]:
        tokens = self.gpus * self.streams * self.speed
        requests = tokens / self.output
        cores = (tokens * costs.gateway_token + requests * costs.gateway_request) / 1e6
        gateways = max(
            math.ceil(cores / self.busy), math.ceil(self.gpus * self.streams / MOST_STREAMS)
        )
        frames = self.gpus * self.speed * _gateways_of(self.streams, gateways)
        parts = {
            "requests": requests * costs.redis_request,
            "frames": frames * costs.redis_frame,
            "engines": self.gpus * costs.redis_engine_second,
        }
        redis = sum(parts.values()) / 1e6
        return {
            "tokens a second": f"{tokens:,.0f}",
            "requests a second": f"{requests:,.0f}",
            "gateway processes": f"{gateways:,}",
            "frames a second": f"{frames:,.0f}",
            "Redis, cores": f"{redis:,.1f}",
            "of them for frames": f"{parts['frames'] / 1e4 / redis:.0f} %",
            "Redis masters": f"{math.ceil(redis / self.busy):,}",
            "to clients, MB/s": f"{tokens * costs.bytes_token / 1e6:,.0f}",
        }


def _gateways_of(streams: int, gateways: int) -> float:
    """How many of the gateways have at least one of an engine's streams, if each stream is at any
    gateway with the same probability."""
    return gateways * (1 - (1 - 1 / gateways) ** streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--gpus", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--streams", type=int, default=64, help="of an engine")
    parser.add_argument("--speed", type=float, default=30.0, help="tokens/s of a stream")
    parser.add_argument("--output", type=float, default=300.0, help="tokens of a request")
    parser.add_argument("--busy", type=float, default=0.6, help="of a core, at most")
    options = parser.parse_args()
    known = json.loads(options.report.read_text())["curves"]
    costs = Costs.of({curve["name"]: curve_of(curve) for curve in known}, options.speed)
    workload = (options.streams, options.speed, options.output, options.busy)
    needs = {gpus: Fleet(gpus, *workload).needs(costs) for gpus in options.gpus}
    table = Table("GPUs", *(f"{gpus:,}" for gpus in needs))
    for name in next(iter(needs.values())):
        table.add_row(name, *(found[name] for found in needs.values()))
    console = Console(width=100)
    console.print(costs)
    console.print(table)


if __name__ == "__main__":
    main()
