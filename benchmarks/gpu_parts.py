"""What gpu.py measures, part by part; each runs in a process of its own and reports as it goes."""

import gc
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import gpu_peers
from gpu_engine import Bench, best_seconds, by_kind, heaviest, idle_gaps, timeline
from gpu_shapes import (
    SHAPES,
    Job,
    Roofs,
    Shape,
    attention_operations,
    conversations,
    predicted_seconds,
)
from gpu_sizes import FULL, TINY, Sizes
from gpu_tests import COMPILED, marked, run_tests
from headrace_engine.attention.base import AttentionBackend
from headrace_engine.attention.reference import ReferenceBackend
from headrace_testing import model_attention

Report = Callable[..., None]
BUDGET = 8192
# Decode steps in a profile.
PROFILED = 6


@dataclass(frozen=True)
class Task:
    """`measured` is None before the device's roofs are. `engine` are options for all engines."""

    model: str
    sizes: Sizes
    out: Path
    measured: Roofs | None
    engine: Mapping[str, Any]

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model]

    @property
    def roofs(self) -> Roofs:
        if self.measured is None:
            raise RuntimeError("the device's roofs have not been measured")
        return self.measured

    @property
    def folder(self) -> Path:
        return self.out / "models" / self.model

    @property
    def tuned(self) -> Path:
        """What one engine has measured the next ones read."""
        return self.out / "tuned"

    def bench(self, **options: Any) -> Bench:
        return Bench(
            self.folder,
            self.shape,
            self.sizes.device,
            max_num_seqs=self.sizes.max_num_seqs,
            max_num_batched_tokens=BUDGET,
            tuned_config_folder=str(self.tuned),
            **{**self.sizes.engine, **self.engine, **options},
        )


def measure_roofs(task: Task, report: Report) -> None:
    sizes, device = task.sizes, torch.device(task.sizes.device)
    report("versions", **versions(device))
    bandwidth = copy_bandwidth(sizes, device)
    report("copy bandwidth", value=bandwidth / 1e9, unit="GB/s")
    products = product_rate(sizes, device)
    report("bfloat16 products", value=products / 1e12, unit="TFLOP/s")
    (task.out / "roofs.json").write_text(json.dumps({"bandwidth": bandwidth, "products": products}))


def copy_bandwidth(sizes: Sizes, device: torch.device) -> float:
    """Bytes a second, read and written together."""
    source = torch.zeros(sizes.copy_bytes // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    seconds = best_seconds(lambda: target.copy_(source), device, sizes.rounds)
    return 2 * sizes.copy_bytes / seconds


def product_rate(sizes: Sizes, device: torch.device) -> float:
    """Operations a second of a large square product."""
    square = (sizes.square, sizes.square)
    left, right = (torch.randn(square, device=device).bfloat16() for _ in range(2))
    seconds = best_seconds(lambda: left @ right, device, sizes.rounds)
    return 2 * sizes.square**3 / seconds


def versions(device: torch.device) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuda"] = str(torch.version.cuda)
        found["triton"] = str(__import__("triton").__version__)
    return found


def measure_steps(task: Task, report: Report) -> None:
    """Decodes, prefills, and a profile of some decode steps."""
    bench = task.bench()
    report(
        "start", load_s=bench.load_seconds, warm_up_s=bench.warm_up_seconds,
        kv_blocks=bench.runner.num_blocks, attention=bench.runner.attention.name,
    )  # fmt: skip
    report_choices(task, report)
    for batch, context, goal in task.sizes.decodes:
        measure_decode(task, bench, report, batch, context, goal)
    for prompts, length in task.sizes.prefills:
        measure_prefill(task, bench, report, prompts, length)


def measure_decode(
    task: Task, bench: Bench, report: Report, batch: int, context: int, goal: float
) -> None:
    steps = task.sizes.steps
    bench.decoding(batch, context, steps + PROFILED + 8)
    bench.step_seconds(4)
    seconds = bench.step_seconds(steps)
    middle = context + 4 + steps // 2
    floor = task.roofs.step(task.shape, [(1, middle)] * batch, batch)
    report(
        f"decode, batch {batch}, context {context}", value=seconds * 1e3, unit="ms a step",
        share=floor / seconds, goal=goal, tokens_per_s=batch / seconds,
    )  # fmt: skip
    trace = task.out / f"trace-{task.model}-decode-{batch}.json"
    what = f"gap between decode steps, batch {batch}"
    if events := bench.profile(PROFILED, trace):
        gaps = idle_gaps(events)[: PROFILED - 1]
        report(
            what, value=gaps[len(gaps) // 2] if gaps else 0.0, unit="us", goal=40.0,
            lower_is_better=True, steps=PROFILED, top_kernels=heaviest(events),
            idle_us=sum(idle_gaps(events)), events=len(events),
        )  # fmt: skip
        report_kinds(task, report, batch, context, by_kind(events, PROFILED))
    else:
        report(what, problem="the profiler saw nothing on the device")
    bench.abort()


def report_kinds(
    task: Task, report: Report, batch: int, context: int, kinds: Mapping[str, float]
) -> None:
    """What stands between a decode step and the roof, by kinds of kernels."""
    floors = task.roofs.decode(task.shape, batch, context)
    for name, micros in kinds.items():
        share = {"share": floors[name] / micros} if name in floors and micros else {}
        what = f"decode step, batch {batch}, context {context}: {name}"
        report(what, value=micros, unit="us", **share)


def report_choices(task: Task, report: Report) -> None:
    """Which kernels were chosen at warm-up, beside what would be used without measuring."""
    for file in sorted(task.tuned.glob("*.json")):
        for kernel, found in json.loads(file.read_text())["kernels"].items():
            micros, chosen = found["microseconds"], found["chosen"]
            default = next(iter(micros))
            seconds = micros[chosen] / 1e6
            floor = found["read_bytes"] / task.roofs.bandwidth
            report(
                f"tuned: {kernel}", value=micros[chosen], unit="us", chosen=chosen,
                default=default, default_us=micros[default], refused=found["refused"],
                **({"share": floor / seconds} if floor else {}),
            )  # fmt: skip


def measure_prefill(task: Task, bench: Bench, report: Report, prompts: int, length: int) -> None:
    seconds = []
    for _ in range(2):  # the first compiles what no decode has needed
        for _ in range(prompts):
            bench.add(bench.prompt(length), 1)
        bench.synchronize()
        begun = time.perf_counter()
        bench.finish()
        bench.synchronize()
        seconds.append(time.perf_counter() - begun)
    operations = prompts * (
        2 * length * task.shape.layer_weights + attention_operations(task.shape, length, length)
    )
    rate = operations / min(seconds)
    report(
        f"prefill, {prompts} of {length}", value=min(seconds) * 1e3, unit="ms",
        share=rate / task.roofs.products, goal=0.6, tokens_per_s=prompts * length / min(seconds),
    )  # fmt: skip


def measure_serving(task: Task, report: Report) -> None:
    sizes = task.sizes
    bench = task.bench()
    jobs = conversations(sizes.requests, task.shape.vocab, sizes.longest)
    bench.serve(jobs[: sizes.max_num_seqs // 4])
    seconds, tokens = bench.serve(jobs)
    made = sum(map(len, tokens.values()))
    wanted = sum(job.output for job in jobs)
    if made < wanted:
        raise RuntimeError(f"{made} tokens came, {wanted} were asked for")
    floor = predicted_seconds(task.shape, task.roofs, jobs, sizes.max_num_seqs, BUDGET)
    report(
        f"{sizes.requests} conversations at once", value=wanted / seconds, unit="tokens/s",
        share=floor / seconds, goal=0.8, seconds=seconds,
    )  # fmt: skip


def measure_peers(task: Task, report: Report) -> None:
    sizes = task.sizes
    jobs = conversations(sizes.peer_requests, task.shape.vocab, sizes.longest)
    if not (task.folder / "config.json").exists():
        task.folder.mkdir(parents=True, exist_ok=True)
        (task.folder / "config.json").write_text(json.dumps(task.shape.config()))
    model = gpu_peers.load(task.folder, sizes.device)
    made, seconds = gpu_peers.static_batches(model, jobs, sizes.device, sizes.peer_seconds)
    report("transformers, static batches", value=made / seconds, unit="tokens/s", ours_wanted=6.0)
    made, seconds = gpu_peers.continuous(model, jobs, sizes.peer_seconds, sizes.peer)
    report("transformers, generate_batch", value=made / seconds, unit="tokens/s", ours_wanted=3.0)


def measure_deterministic(task: Task, report: Report) -> None:
    """What `deterministic` costs, and whether it holds: some requests alone and among others."""
    bench = task.bench(deterministic=True)
    jobs = conversations(task.sizes.max_num_seqs, task.shape.vocab, task.sizes.longest // 4)
    together = in_order(bench.serve(jobs)[1])
    alone = [in_order(bench.serve([job])[1])[0] for job in jobs[:4]]
    equal = sum(one == other for one, other in zip(alone, together, strict=False))
    report("deterministic, equal alone and in a crowd", value=equal, unit=f"of {len(alone)}")
    for batch, context, _ in task.sizes.decodes[:2]:
        bench.decoding(batch, context, task.sizes.steps + 8)
        bench.step_seconds(4)
        seconds = bench.step_seconds(task.sizes.steps)
        report(
            f"deterministic, decode, batch {batch}, context {context}",
            value=seconds * 1e3, unit="ms a step",
        )  # fmt: skip
        bench.abort()


def in_order(tokens: Mapping[str, list[int]]) -> list[list[int]]:
    """By the requests' numbers."""
    return [one for _, one in sorted(tokens.items(), key=lambda item: int(item[0]))]


def measure_equality(task: Task, report: Report) -> None:
    """Greedy tokens with and without graphs, with and without asynchronous steps. A graph pads its
    batch, for which cuBLAS may round otherwise: equal they must be in deterministic mode."""
    jobs = conversations(task.sizes.max_num_seqs, task.shape.vocab, min(64, task.sizes.longest))
    compare_kinds(task, report, jobs, deterministic=True)
    compare_kinds(task, report, jobs, deterministic=False)


def compare_kinds(task: Task, report: Report, jobs: list[Job], deterministic: bool) -> None:
    outputs: list[list[list[int]]] = []
    kinds = (
        {"async_scheduling": True},
        {"async_scheduling": False},
        {"enforce_eager": True, "async_scheduling": False},
    )
    for options in kinds:
        bench = task.bench(**options, deterministic=deterministic, num_blocks=4096)
        _, tokens = bench.serve(jobs)
        del bench
        outputs.append(in_order(tokens))
        gc.collect()  # an engine and its graphs refer to each other
        if task.sizes.device == "cuda":
            torch.cuda.empty_cache()
    for kind, (first, second) in zip(("asynchronous", "graphs"), pairwise(outputs), strict=True):
        equal = sum(one == other for one, other in zip(first, second, strict=True))
        mode = "deterministic, " if deterministic else ""
        what = f"{mode}equal tokens with and without {kind}"
        report(what, value=equal, unit=f"of {len(jobs)}")


def _triton() -> AttentionBackend:
    from headrace_engine.attention.triton import TritonBackend

    return TritonBackend()


def measure_kernels(task: Task, report: Report) -> None:
    """Attention with the shapes that models have, beside the reference."""
    device = torch.device(task.sizes.device)
    make = _triton if device.type == "cuda" else ReferenceBackend
    for name, case in model_attention.SHAPES.items():
        for dtype, bound in model_attention.BOUNDS.items():
            if name not in task.sizes.all_dtypes and dtype is not torch.bfloat16:
                continue
            if not task.sizes.model_shapes:
                case = replace(case, runs=((20, 1), (3, 5)))
            exact = model_attention.model_output(case, ReferenceBackend(), dtype, device).double()
            found = model_attention.model_output(case, make(), dtype, device).double()
            worst = float(((found - exact).abs() / (1.0 + exact.abs())).max())
            what = f"attention, {name}, {str(dtype).removeprefix('torch.')}"
            report(what, value=worst, unit="error", goal=bound, lower_is_better=True)


def measure_profile(task: Task, report: Report) -> None:
    """Decode steps kernel by kernel, in files beside their traces."""
    bench = task.bench()
    for batch, context, _ in task.sizes.decodes:
        bench.decoding(batch, context, PROFILED + 12)
        bench.step_seconds(4)
        name = f"profile-{task.model}-decode-{batch}"
        events = bench.profile(PROFILED, task.out / f"{name}.json")
        (task.out / f"{name}.txt").write_text("\n".join(timeline(events, PROFILED)) + "\n")
        what = f"decode step, batch {batch}, context {context}"
        report(what, launches=len(events) / PROFILED, steps=PROFILED, top_kernels=heaviest(events))
        report_kinds(task, report, batch, context, by_kind(events, PROFILED))
        bench.abort()


def measure_tests(task: Task, report: Report) -> None:
    run_tests(marked(), task.out, report)


def measure_compiled_tests(task: Task, report: Report) -> None:
    run_tests(COMPILED, task.out, report)


PARTS: Mapping[str, Callable[[Task, Report], None]] = {
    "roofs": measure_roofs,
    "steps": measure_steps,
    "serving": measure_serving,
    "peers": measure_peers,
    "deterministic": measure_deterministic,
    "equality": measure_equality,
    "kernels": measure_kernels,
    "profile": measure_profile,
    "tests": measure_tests,
    "compiled": measure_compiled_tests,
}


# Steps as they were before graphs and steps ahead: for a second try where the first one fails.
SAFE: Mapping[str, Any] = {"enforce_eager": True, "async_scheduling": False}


def run_part(name: str, model: str, out: Path, tiny: bool, safe: bool) -> None:
    """Runs a part in this process, which ends with it."""
    if tiny:
        torch.set_num_threads(1)
    measure_part(name, model, out, TINY if tiny else FULL, SAFE if safe else {})
    os._exit(0)  # transformers' manager has a thread that would keep the process


def measure_part(name: str, model: str, out: Path, sizes: Sizes, engine: Mapping[str, Any]) -> None:
    """Runs a part; each thing that it reports is a line of results.jsonl at once."""
    found = out / "roofs.json"
    roofs = Roofs(**json.loads(found.read_text())) if found.exists() else None

    def report(what: str, **values: Any) -> None:
        line = {"part": name, "model": model, "what": what, **values}
        if engine:
            line["engine"] = dict(engine)
        with (out / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    PARTS[name](Task(model, sizes, out, roofs, engine), report)
