"""Computes the time that gpu.py's goals leave for work other than reading weights, for devices that
are not at hand. Only the devices' copy bandwidth and product rate were measured.

    PYTHONPATH=engine:common python benchmarks/gpu_predicted.py [--launch-us 1 2] [--most]

A step is estimated kernel by kernel. Products and decodes reach a share of the roofs. Kernels that
only move activations reach a share of the bandwidth if a step's rows do not stay in the L2 cache.
Each launch adds a fixed time. Decode steps of few rows have the fewest launches that an engine may
choose (`step_launches.py --fewest`), or with --most as many as all other steps.
Prints the share of the roofline that results, the goal, and the share of their rooflines that
kernels must reach for the goal.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from gpu_benchmark.shapes import (
    SHAPES,
    Roofs,
    Shape,
    attention_operations,
    conversations,
    predicted_seconds,
)
from gpu_benchmark.sizes import FULL
from headrace_engine.kernels.triton.launch import ROW_BOUNDS
from step_launches import decode_step

# Bytes per second of a copy, and bfloat16 operations per second of a large square product, measured
# once on each kind of device.
DEVICES = {"H100": Roofs(3.0e12, 798e12), "H200": Roofs(4.3e12, 788e12)}
# Tokens of a step as in gpu.py; launches between two forward passes; the goals of prefill and of
# conversations.
BUDGET, SAMPLING, PREFILL_GOAL, SERVING_GOAL = 8192, 4, 0.6, 0.8
# Rows of a step whose activations stay in the L2 cache.
CACHED_ROWS = 512


@dataclass(frozen=True)
class Estimate(Roofs):
    """Predicts the seconds of steps whose kernels reach these shares of the rooflines."""

    launch: float = 2e-6
    reading: float = 0.93
    multiplying: float = 0.85
    attending: float = 0.5
    moving: float = 0.8
    fewest: bool = True

    def step(self, shape: Shape, runs: list[tuple[int, int]], sampled: int) -> float:
        tokens = sum(new for new, _ in runs)
        read = shape.step_bytes(tokens) / (self.bandwidth * self.reading)
        operations = 2.0 * (tokens * shape.layer_weights + sampled * shape.vocab * shape.hidden)
        seconds = max(read, operations / (self.products * self.multiplying))
        keys = sum(keys for new, keys in runs if new == 1)
        seconds += keys * shape.kv_bytes / (self.bandwidth * self.reading)
        prompts = sum(attention_operations(shape, new, keys) for new, keys in runs if new > 1)
        seconds += prompts / (self.products * self.attending)
        if tokens > CACHED_ROWS:
            seconds += tokens * activation_bytes(shape) / (self.bandwidth * self.moving)
        return seconds + self.launching(shape, runs)

    def launching(self, shape: Shape, runs: list[tuple[int, int]]) -> float:
        """Seconds that the launches of a step take, without their work."""
        few = len(runs) <= ROW_BOUNDS[-1] and all(new == 1 for new, _ in runs)
        return self.launch * launches(shape, self.fewest and few)


def activation_bytes(shape: Shape) -> int:
    """Bytes of one token that norms, rotation and activations read and write."""
    norms = 2 * 4 * shape.hidden
    rotation = 2 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return 2 * shape.layers * (norms + rotation + 3 * shape.inner)


@cache
def launches(shape: Shape, fewest: bool) -> int:
    return decode_step(shape.config(), 1, 1024, fewest=fewest).total + SAMPLING


@dataclass(frozen=True)
class Line:
    """A line of the table. `floor` (the roofline) and `estimate` are seconds; `goal` and `needed`
    are shares of a roofline. `needed` is 0 if it is not computed."""

    device: str
    model: str
    what: str
    floor: float
    estimate: float
    goal: float
    needed: float

    def __str__(self) -> str:
        share = self.floor / self.estimate
        verdict = "met" if share >= self.goal else "missed"
        needed = f"{100 * self.needed:.0f} %" if self.needed else ""
        return (
            f"| {self.device} | {self.model} | {self.what} | {1e3 * self.floor:.2f} ms "
            f"| {1e3 * self.estimate:.2f} ms | {100 * share:.0f} % | {100 * self.goal:.0f} % "
            f"| {verdict} | {needed} |"
        )


def lines(launch: float, fewest: bool) -> Iterator[Line]:
    for device, roofs in DEVICES.items():
        for model in ("8b", "1b"):
            estimate = Estimate(roofs.bandwidth, roofs.products, launch, fewest=fewest)
            yield from decodes(device, model, roofs, estimate)
            yield from prefills(device, model, roofs, estimate)
            yield conversation_line(device, model, roofs, estimate)


def decodes(device: str, model: str, roofs: Roofs, estimate: Estimate) -> Iterator[Line]:
    shape = SHAPES[model]
    for batch, context, goal in FULL.decodes:
        runs = [(1, context)] * batch
        floor = roofs.step(shape, runs, batch)
        left = floor / (goal or 1.0) - estimate.launching(shape, runs)
        needed = floor / left
        what = f"decode, batch {batch}, context {context}"
        seconds = estimate.step(shape, runs, batch)
        yield Line(device, model, what, floor, seconds, goal or 0.0, needed)


def prefills(device: str, model: str, roofs: Roofs, estimate: Estimate) -> Iterator[Line]:
    shape = SHAPES[model]
    for prompts, length in FULL.prefills:
        # Without the head's product, as gpu.py counts operations.
        wanted = 2 * length * shape.layer_weights + attention_operations(shape, length, length)
        floor = prompts * wanted / roofs.products
        fitting = max(1, BUDGET // length)
        steps = -(-prompts // fitting)
        seconds = steps * estimate.step(shape, [(length, length)] * min(prompts, fitting), 1)
        yield Line(
            device, model, f"prefill, {prompts} of {length}", floor, seconds, PREFILL_GOAL, 0
        )


def conversation_line(device: str, model: str, roofs: Roofs, estimate: Estimate) -> Line:
    shape = SHAPES[model]
    jobs = conversations(FULL.requests, shape.vocab, FULL.longest)
    floor, seconds = (
        predicted_seconds(shape, one, jobs, FULL.max_num_seqs, BUDGET) for one in (roofs, estimate)
    )
    what = f"{FULL.requests} conversations at once"
    return Line(device, model, what, floor, seconds, SERVING_GOAL, 0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--launch-us", type=float, nargs="+", default=[2.0], help="microseconds of a launch"
    )
    parser.add_argument(
        "--most", action="store_true", help="as many launches for few rows as for many"
    )
    wanted = parser.parse_args(arguments)
    for micros in wanted.launch_us:
        print(f"{micros:g} µs a launch; nothing below is measured\n")
        print(
            "| device | model | workload | roof | estimate | of the roof | goal | | kernels need |"
        )
        print("| --- " * 9 + "|")
        for line in lines(micros * 1e-6, not wanted.most):
            print(line)
        print()


if __name__ == "__main__":
    main()
