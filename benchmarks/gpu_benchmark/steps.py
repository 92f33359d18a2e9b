"""The speed measurements of gpu.py: the device's rooflines, then single steps, adapters and whole
workloads, each compared with its roofline."""

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from . import peers
from .adapters import write_adapters
from .engine import Bench, WatchedStep, best_seconds, by_kind, heaviest, idle_gaps
from .shapes import attention_operations, conversations, predicted_seconds
from .sizes import Sizes
from .table import ROOFS
from .task import BUDGET, PROFILED, Report, Task

# Launches in a captured graph of kernels that do almost nothing.
EMPTY_LAUNCHES = 256
TUNED = "tuned: "


def measure_roofs(task: Task, report: Report) -> None:
    sizes, device = task.sizes, torch.device(task.sizes.device)
    report("versions", **versions(device))
    bandwidth = copy_bandwidth(sizes, device)
    report("copy bandwidth", value=bandwidth / 1e9, unit="GB/s")
    products = product_rate(sizes, device)
    report("bfloat16 products", value=products / 1e12, unit="TFLOP/s")
    (task.work / ROOFS).write_text(json.dumps({"bandwidth": bandwidth, "products": products}))
    if device.type == "cuda":
        report("a recorded launch of next to nothing", value=launch_seconds() * 1e6, unit="us")


def copy_bandwidth(sizes: Sizes, device: torch.device) -> float:
    """Bytes per second, reads and writes together."""
    source = torch.randn(sizes.copy_bytes // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    seconds = best_seconds(lambda: target.copy_(source), device, sizes.rounds)
    return 2 * sizes.copy_bytes / seconds


def product_rate(sizes: Sizes, device: torch.device) -> float:
    """Operations per second of a large square matrix product."""
    square = (sizes.square, sizes.square)
    left, right = (torch.randn(square, device=device).bfloat16() for _ in range(2))
    seconds = best_seconds(lambda: left @ right, device, sizes.rounds)
    return 2 * sizes.square**3 / seconds


def launch_seconds() -> float:
    """Seconds between two kernels of one element in a graph: the cost of a launch alone."""
    number = torch.zeros(1, device="cuda")
    make_graph: Any = torch.cuda.CUDAGraph
    record: Any = torch.cuda.graph
    number.add_(1)
    graph = make_graph()
    with record(graph):
        for _ in range(EMPTY_LAUNCHES):
            number.add_(1)
    return best_seconds(graph.replay, number.device, 5) / EMPTY_LAUNCHES


def versions(device: torch.device) -> dict[str, str]:
    found = {"date": time.strftime("%Y-%m-%d", time.gmtime())}
    found |= {"python": platform.python_version(), "torch": str(torch.__version__)}
    found["transformers"] = str(__import__("transformers").__version__)
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuda"] = str(torch.version.cuda)
        found["triton"] = str(__import__("triton").__version__)
    return found


def measure_steps(task: Task, report: Report) -> None:
    """Measures decodes, prefills, and a profile of some decode steps."""
    sizes = task.sizes
    decodes = sizes.few_decodes if task.shape.variant else sizes.decodes
    widest = max(batch for batch, _, _ in decodes)
    bench = task.bench(max_num_seqs=widest)
    report_start(bench, report)
    report_choices(task, report)
    for batch, context, goal in decodes:
        measure_decode(task, bench, report, batch, context, goal)
    for prompts, length in sizes.prefills[:1] if task.shape.variant else sizes.prefills:
        measure_prefill(task, bench, report, prompts, length)


def report_start(bench: Bench, report: Report) -> None:
    report(
        "start", load_s=bench.load_seconds, warm_up_s=bench.warm_up_seconds,
        kv_blocks=bench.runner.num_blocks, attention=bench.runner.attention.name,
    )  # fmt: skip


def measure_decode(
    task: Task, bench: Bench, report: Report, batch: int, context: int, goal: float | None
) -> None:
    what = f"decode, batch {batch}, context {context}"
    if what in task.done:
        return
    steps = task.sizes.steps
    bench.decoding(batch, context, steps + PROFILED + 8)
    bench.step_seconds(4)
    taken = bench.step_seconds(steps)
    seconds = statistics.median(taken)
    middle = context + 4 + steps // 2
    floor = task.roofs.step(task.shape, [(1, middle)] * batch, batch)
    report(
        what, value=seconds * 1e3, unit="ms a step", share=floor / seconds, goal=goal,
        tokens_per_s=batch / seconds, longest_ms=taken[-1] * 1e3,
    )  # fmt: skip
    profile_decode(task, bench, report, batch, context)
    bench.abort()


def profile_decode(task: Task, bench: Bench, report: Report, batch: int, context: int) -> None:
    what = f"gap between decode steps, batch {batch}"
    trace = task.work / f"trace-{task.model}-decode-{batch}.json"
    events = bench.profile(PROFILED, trace)
    if not events:
        report(what, problem="the profiler saw nothing on the device")
        return
    gaps = idle_gaps(events)[: PROFILED - 1]
    report(
        what, value=gaps[len(gaps) // 2] if gaps else 0.0, unit="us", goal=40.0,
        lower_is_better=True, steps=PROFILED, top_kernels=heaviest(events),
        idle_us=sum(idle_gaps(events)), events=len(events),
    )  # fmt: skip
    report_kinds(task, report, batch, context, by_kind(events, PROFILED))


def report_kinds(
    task: Task, report: Report, batch: int, context: int, kinds: Mapping[str, float]
) -> None:
    """Reports a decode step's time by kind of kernel, relative to its roofline."""
    floors = task.roofs.decode(task.shape, batch, context)
    for name, micros in kinds.items():
        share = {"share": floors[name] / micros} if name in floors and micros else {}
        what = f"decode step, batch {batch}, context {context}: {name}"
        report(what, value=micros, unit="us", **share)


def report_choices(task: Task, report: Report) -> None:
    """Reports the kernels chosen at warm-up, with the defaults that they replaced."""
    for file in sorted(task.tuned.glob("*.json")):
        for kernel, found in json.loads(file.read_text())["kernels"].items():
            if (what := f"{TUNED}{kernel}") in task.done:
                continue
            micros, chosen = found["microseconds"], found["chosen"]
            default = next(iter(micros))
            seconds = micros[chosen] / 1e6
            floor = found["read_bytes"] / task.roofs.bandwidth
            report(
                what, value=micros[chosen], unit="us", chosen=chosen,
                default=default, default_us=micros[default], refused=found["refused"],
                **({"share": floor / seconds} if floor and seconds else {}),
            )  # fmt: skip


def measure_prefill(task: Task, bench: Bench, report: Report, prompts: int, length: int) -> None:
    if (what := f"prefill, {prompts} of {length}") in task.done:
        return
    seconds = [prefill_seconds(bench, prompts, length) for _ in range(2)]  # the first one compiles
    operations = prompts * (
        2 * length * task.shape.layer_weights + attention_operations(task.shape, length, length)
    )
    rate = operations / min(seconds)
    report(
        what, value=min(seconds) * 1e3, unit="ms", share=rate / task.roofs.products,
        goal=None if task.shape.variant else 0.6, tokens_per_s=prompts * length / min(seconds),
    )  # fmt: skip


def prefill_seconds(bench: Bench, prompts: int, length: int) -> float:
    for _ in range(prompts):
        bench.add(bench.prompt(length), 1)
    bench.synchronize()
    begun = time.perf_counter()
    bench.finish()
    bench.synchronize()
    return time.perf_counter() - begun


def measure_lora(task: Task, report: Report) -> None:
    """Measures decodes in which every sequence uses one of several adapters, and compares them with
    decodes without adapters."""
    sizes = task.sizes
    batch, context, count, rank = sizes.lora
    with tempfile.TemporaryDirectory() as place:
        modules = write_adapters(Path(place), task.shape, count, rank)
        bench = task.bench(
            enable_lora=True, lora_modules=modules, max_loras=count, max_lora_rank=rank,
            max_num_seqs=batch,
        )  # fmt: skip
        report_start(bench, report)
        report_choices(task, report)
        timed = {}
        for names in ((None,), tuple(modules)):
            bench.decoding(batch, context, sizes.steps + PROFILED + 8, names)
            bench.step_seconds(4)
            timed[len(names)] = statistics.median(bench.step_seconds(sizes.steps))
            if names != (None,):
                profile_decode(task, bench, report, batch, context)
            bench.abort()
    plain, adapted = timed.values()
    floor = task.roofs.step(task.shape, [(1, context)] * batch, batch)
    report(
        f"LoRA, {count} adapters of rank {rank}, decode, batch {batch}, context {context}",
        value=adapted * 1e3, unit="ms a step", share=floor / adapted, without_ms=plain * 1e3,
        adapters_cost=adapted / plain - 1.0,
    )  # fmt: skip


def measure_serving(task: Task, report: Report) -> None:
    sizes = task.sizes
    bench = task.bench()
    jobs = conversations(sizes.requests, task.shape.vocab, sizes.longest)
    bench.serve(jobs[: sizes.max_num_seqs // 4])
    report("first conversations", served=sizes.max_num_seqs // 4)
    with bench.watched() as steps:
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
    report_watched(task, report, steps)


def report_watched(task: Task, report: Report, steps: Sequence[WatchedStep]) -> None:
    """Reports the time between two submissions by kind of step, relative to the roofline."""
    sums: dict[str, list[float]] = {}
    for step, following in pairwise(steps):
        of_kind = sums.setdefault(step.kind, [0.0, 0.0, 0.0])
        of_kind[0] += following.begun - step.begun
        of_kind[1] += task.roofs.step(task.shape, step.runs, len(step.runs))
        of_kind[2] += 1
    for kind, (seconds, floor, count) in sorted(sums.items()):
        report(
            f"conversations, steps of {kind}", value=1e3 * seconds / count, unit="ms a step",
            share=floor / seconds, steps=int(count), seconds=seconds,
        )  # fmt: skip


def measure_peers(task: Task, report: Report) -> None:
    sizes = task.sizes
    jobs = conversations(sizes.peer_requests, task.shape.vocab, sizes.longest)
    if not (task.folder / "config.json").exists():
        task.folder.mkdir(parents=True, exist_ok=True)
        (task.folder / "config.json").write_text(json.dumps(task.shape.config()))
    model = peers.load(task.folder, sizes.device)
    report("transformers, loaded", attention=str(model.config._attn_implementation))
    ways: tuple[tuple[str, float, Callable[[], tuple[int, float]]], ...] = (
        ("static batches", 6.0,
         lambda: peers.static_batches(model, jobs, sizes.device, sizes.peer_seconds)),
        ("generate_batch", 3.0,
         lambda: peers.continuous(model, jobs, sizes.peer_seconds, sizes.peer)),
    )  # fmt: skip
    for name, times, run in ways:
        made, seconds = run()
        report(
            f"transformers, {name}", value=made / seconds, unit="tokens/s", ours_wanted=times,
            seconds=seconds,
        )  # fmt: skip
