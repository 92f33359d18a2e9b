"""Curves of frames: what Redis pays for the tokens that engines send to gateways.

Each engine has 64 streams, so a frame to one of 8 gateways has 8 tokens.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from queue_path.frames import Flow, Traffic, measure
from queue_path.processes import valkey

from .curve import Curve, up_to

HOP_LIMIT_MS = 10.0
ENGINES, GATEWAYS = 32, 8
STEPS = 30.0  # a second, of each engine
STEPS_BY_LOAD = (0.25, 1.0, 4.0, 15.0, 30.0, 60.0, 0.0)  # 0: as many as they can


def frames(most: int, seconds: float) -> Iterator[Curve]:
    """CPU of Redis, replies to gateways and hops over frames a second, up to what this machine
    carries."""
    cpu = Curve("Redis, by frames", "frames a second", "Redis, a second", "ms")
    reads = Curve("frames of a reply", "frames a second", "frames of a reply", "frames")
    hop = Curve("hop, by frames", "frames a second", "median of a frame's hop", "ms", HOP_LIMIT_MS)
    engines = min(ENGINES, most)
    flows = [
        _flow(Traffic(engines=engines, gateways=GATEWAYS, steps=steps), seconds)
        for steps in STEPS_BY_LOAD
    ]
    for flow in sorted(flows, key=lambda flow: flow.frames):
        size = round(flow.frames)
        cpu.add(size, flow.redis_ms)
        reads.add(size, flow.frames / flow.reads)
        hop.add(size, flow.hop_ms[0])
    yield from (cpu, reads, hop)


def frame(most: int, seconds: float) -> Iterator[Curve]:
    """CPU of Redis for a frame, over engines and over the gateways of each engine."""
    curve = Curve("a frame, by engines", f"engines, {GATEWAYS} gateways", "Redis, a frame", "µs")
    for engines in up_to(most, [1, 4, 16, 64, 128]):
        flow = _flow(Traffic(engines=engines, gateways=GATEWAYS, steps=STEPS), seconds)
        curve.add(engines, _frame_us(flow))
    yield curve
    curve = Curve("a frame, by gateways", "gateways, 16 engines", "Redis, a frame", "µs")
    for gateways in up_to(most, [1, 4, 16, 64]):
        flow = _flow(Traffic(engines=16, gateways=gateways, steps=STEPS), seconds)
        curve.add(gateways, _frame_us(flow))
    yield curve


def _flow(traffic: Traffic, seconds: float) -> Flow:
    with tempfile.TemporaryDirectory() as folder, valkey(Path(folder)) as redis:
        return measure(redis, traffic, seconds)


def _frame_us(flow: Flow) -> float:
    return 1e3 * flow.redis_ms / flow.frames
