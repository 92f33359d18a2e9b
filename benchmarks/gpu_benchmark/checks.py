"""The checks of gpu.py: equal tokens, attention against the reference, profiles of single kernels,
and the project's own tests."""

import gc
import statistics
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import torch

from headrace_engine.attention.reference import ReferenceBackend
from headrace_engine.core.attention_backend import AttentionBackend
from headrace_testing import model_attention

from .engine import by_kind, heaviest, timeline
from .shapes import Job, conversations
from .steps import report_kinds
from .task import PROFILED, Report, Task


def measure_deterministic(task: Task, report: Report) -> None:
    """Measures the cost of `deterministic`. Checks that requests get the same tokens alone and
    among others."""
    bench = task.bench(deterministic=True)
    jobs = conversations(task.sizes.max_num_seqs, task.shape.vocab, task.sizes.longest // 4)
    together = in_order(bench.serve(jobs)[1])
    alone = [in_order(bench.serve([job])[1])[0] for job in jobs[:4]]
    equal = sum(one == other for one, other in zip(alone, together, strict=False))
    report("deterministic, equal alone and among others", value=equal, unit=f"of {len(alone)}")
    for batch, context, _ in task.sizes.decodes[:2]:
        bench.decoding(batch, context, task.sizes.steps + 8)
        bench.step_seconds(4)
        seconds = statistics.median(bench.step_seconds(task.sizes.steps))
        report(
            f"deterministic, decode, batch {batch}, context {context}",
            value=seconds * 1e3, unit="ms a step",
        )  # fmt: skip
        bench.abort()


def in_order(tokens: Mapping[str, list[int]]) -> list[list[int]]:
    """Tokens of requests, in the order of the requests' numbers."""
    return [one for _, one in sorted(tokens.items(), key=lambda item: int(item[0]))]


def measure_equality(task: Task, report: Report) -> None:
    """Compares greedy tokens with and without graphs, and with and without asynchronous steps.

    A graph pads its batch, for which cuBLAS may round differently, so tokens must be equal only in
    deterministic mode.
    """
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
        gc.unfreeze()
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
    """Compares attention with the reference, for the shapes of real models."""
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
    """Profiles decode steps kernel by kernel, and writes the tables next to their traces."""
    bench = task.bench()
    for batch, context, _ in task.sizes.decodes:
        bench.decoding(batch, context, PROFILED + 12)
        bench.step_seconds(4)
        name = f"profile-{task.model}-decode-{batch}"
        events = bench.profile(PROFILED, task.work / f"{name}.json")
        (task.work / f"{name}.txt").write_text("\n".join(timeline(events, PROFILED)) + "\n")
        what = f"decode step, batch {batch}, context {context}"
        report(what, launches=len(events) / PROFILED, steps=PROFILED, top_kernels=heaviest(events))
        report_kinds(task, report, batch, context, by_kind(events, PROFILED))
        bench.abort()


def measure_tests(task: Task, report: Report) -> None:
    from . import tests  # needs pytest, which the other checks do not

    tests.run_tests("tests", tests.marked(), task.work, report)


def measure_compiled_tests(task: Task, report: Report) -> None:
    from . import tests

    tests.run_tests("compiled", tests.COMPILED, task.work, report)
