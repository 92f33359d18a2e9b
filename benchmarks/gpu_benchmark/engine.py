"""Drives Headrace's engine for gpu.py: a model with random weights, decoding batches, and profiles
of the device."""

import gc
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.request import EngineRequest
from headrace_engine.core.step_plan import SchedulerOutput
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner

from .shapes import Job, Shape

Event = tuple[float, float, str]  # (begin and end in microseconds, name)


@dataclass(frozen=True)
class WatchedStep:
    """A step submitted at `begun` (seconds), with its runs (tokens, number of keys at their
    end)."""

    begun: float
    runs: list[tuple[int, int]]

    @property
    def kind(self) -> str:
        """The kind of step, by what determines its duration."""
        prompts = sum(tokens for tokens, _ in self.runs if tokens > 1)
        if prompts:
            return "prompts, " + ("more tokens" if prompts > 768 else "up to 768 tokens")
        most = next((most for most in (16, 64, 128) if len(self.runs) <= most), None)
        return f"decodes, up to {most}" if most else "decodes, more"


class Bench:
    """An engine on `device`, built once and used for several workloads."""

    def __init__(self, folder: Path, shape: Shape, device: str, **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(shape.config()))
        self.shape, self.device = shape, torch.device(device)
        self.config = EngineConfig(
            model=str(folder),
            load_format="dummy",
            device=device,
            enable_prefix_caching=False,
            max_model_len=shape.context,
            **options,
        )
        begun = time.perf_counter()
        self.runner = ModelRunner(self.config)
        self.load_seconds = time.perf_counter() - begun
        begun = time.perf_counter()
        self.runner.warm_up()
        self.warm_up_seconds = time.perf_counter() - begun
        self._watched: list[WatchedStep] | None = None
        runner: Any = self.runner
        # The engine keeps these methods, so they are replaced before it is made.
        runner.submit, runner.execute = map(self._watching, (runner.submit, runner.execute))
        self.engine = Engine(self.config, self.runner)
        self._made = 0
        gc.collect()
        gc.freeze()  # as a serving engine does

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def add(self, prompt: list[int], output: int, lora: str | None = None, **params: Any) -> str:
        self._made += 1
        name = str(self._made)
        sampling = {"temperature": 0.0, "ignore_eos": True, **params}
        self.engine.add_request(
            EngineRequest(
                request_id=name,
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(**sampling, max_tokens=output),
                seed=0,
                lora=lora,
            )
        )
        return name

    def prompt(self, length: int) -> list[int]:
        rng = random.Random(self._made)
        return [rng.randrange(10, self.shape.vocab) for _ in range(length)]

    def finish(self) -> dict[str, list[int]]:
        """Runs steps until all requests have ended; returns tokens by request."""
        tokens: dict[str, list[int]] = {}
        while self.engine.has_work:
            for output in self.engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        return tokens

    def serve(self, jobs: Iterable[Job]) -> tuple[float, dict[str, list[int]]]:
        """Runs all jobs, added at once; returns the seconds and their tokens."""
        for job in jobs:
            self.add(job.prompt, job.output)
        self.synchronize()
        begun = time.perf_counter()
        tokens = self.finish()
        self.synchronize()
        return time.perf_counter() - begun, tokens

    @contextmanager
    def watched(self) -> Iterator[list[WatchedStep]]:
        """Records each step that is submitted within the block, with its time."""
        found: list[WatchedStep] = []
        self._watched = found
        try:
            yield found
        finally:
            self._watched = None

    def _watching(
        self, run: Callable[[SchedulerOutput], object]
    ) -> Callable[[SchedulerOutput], object]:
        """`run`, which also records the step while steps are watched."""

        def noting(plan: SchedulerOutput) -> object:
            if self._watched is not None:
                runs = [(one.length, one.start + one.length) for one in plan.scheduled]
                self._watched.append(WatchedStep(time.perf_counter(), runs))
            return run(plan)

        return noting

    def decoding(
        self, batch: int, context: int, steps: int, adapters: Sequence[str | None] = (None,)
    ) -> None:
        """Brings `batch` sequences to `context` keys; each can still decode for `steps` steps.

        Sequences get the adapters in turn.
        """
        # The first sequences decode while the prompts of the others are computed.
        meanwhile = batch * context // self.config.max_num_batched_tokens
        for place in range(batch):
            lora = adapters[place % len(adapters)]
            self.add(self.prompt(context), steps + 2 * meanwhile + 4, lora)
        while self.engine.stats().waiting or self._prefilling():
            self.engine.step()
        if (running := len(list(self.engine.running()))) != batch:
            raise RuntimeError(f"{running} sequences decode, not {batch}")
        gc.collect()  # the objects of an earlier profile
        gc.freeze()

    def _prefilling(self) -> bool:
        return any(len(one.token_ids) <= one.prompt_length for one in self.engine.running())

    def step_seconds(self, steps: int) -> list[float]:
        """Seconds of each step, including all work of the host."""
        self.synchronize()
        ends = [time.perf_counter()]
        for _ in range(steps):
            self.engine.step()
            ends.append(time.perf_counter())
        self.synchronize()
        return [end - begin for begin, end in pairwise(ends)]

    @property
    def device_allocations(self) -> int:
        """How often torch has asked the driver for memory. Each time a step has to wait."""
        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self.device)["num_device_alloc"])

    def abort(self) -> None:
        for name in list(self.engine.sequences()):
            self.engine.abort(name)
        self.finish()

    def profile(self, steps: int, trace: Path) -> list[Event]:
        """Profiles the device during `steps` steps, without the first, which finds it idle. Writes
        `trace` for chrome://tracing or Perfetto."""
        on_gpu = self.device.type == "cuda"
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
        make: Any = torch.profiler.profile
        with make(activities=kinds) as profiler:
            for _ in range(steps + 1):
                self.engine.step()
            self.synchronize()
        profiler.export_chrome_trace(str(trace))
        events = device_events(json.loads(trace.read_text()), on_gpu)
        return events[len(events) // (steps + 1) :]


def device_events(trace: dict[str, Any], on_gpu: bool) -> list[Event]:
    """The kernels and copies (on CPUs, operators) of a Chrome trace, in order of their
    beginning."""
    wanted = {"kernel", "gpu_memcpy", "gpu_memset"} if on_gpu else {"cpu_op"}
    found = [
        (float(one["ts"]), float(one["ts"]) + float(one["dur"]), str(one["name"]))
        for one in trace["traceEvents"]
        if one.get("cat") in wanted and "dur" in one
    ]
    return sorted(found)


def idle_gaps(events: list[Event]) -> list[float]:
    """Idle times in microseconds between the first event and the last, longest first."""
    gaps: list[float] = []
    end = events[0][1] if events else 0.0
    for begin, stop, _ in events:
        if begin > end:
            gaps.append(begin - end)
        end = max(end, stop)
    return sorted(gaps, reverse=True)


def heaviest(events: list[Event], count: int = 12) -> list[dict[str, Any]]:
    """The kernels with the most total time, with their number of calls and microseconds."""
    sums: dict[str, list[float]] = {}
    for begin, end, name in events:
        entry = sums.setdefault(name[:80], [0.0, 0.0])
        entry[0] += end - begin
        entry[1] += 1
    ranked = sorted(sums.items(), key=lambda item: -item[1][0])[:count]
    return [{"kernel": name, "us": us, "calls": int(calls)} for name, (us, calls) in ranked]


# A kernel's kind is the first one with a matching part of its name. cuBLAS uses many names.
KINDS = {
    "attention": ("decode_kernel", "merge_kernel", "prefill_kernel", "flash", "attention"),
    "products": (
        *(
            "small_batch",
            "vector_product",
            "linear_kernel",
            "packed_",
            "grouped",
            "lora_",
            "expert_",
        ),
        *("gemm", "gemv", "cutlass", "nvjet", "splitk"),
    ),
    "sampling": ("sample_kernel", "argmax", "topk", "sort", "softmax", "reduce"),
}
OTHER = "all else"


def kind(kernel: str) -> str:
    name = kernel.lower()
    return next((one for one, parts in KINDS.items() if any(p in name for p in parts)), OTHER)


def by_kind(events: list[Event], steps: int) -> dict[str, float]:
    """Microseconds of a step by kind of kernel, and the microseconds in which no kernel ran."""
    sums = dict.fromkeys((*KINDS, OTHER), 0.0)
    for begin, end, name in events:
        sums[kind(name)] += (end - begin) / steps
    sums["nothing"] = sum(idle_gaps(events)) / steps
    return sums


def timeline(events: list[Event], steps: int) -> list[str]:
    """Lines with the parts of a step's time, then with the kernels of the last step in order."""
    whole = sum(end - begin for begin, end, _ in events) or 1.0
    lines = ["us a step  calls  share  kernel"]
    for one in heaviest(events, 40):
        calls, share = one["calls"] / steps, 100 * one["us"] / whole
        lines.append(f"{one['us'] / steps:9.1f} {calls:6.1f} {share:5.1f}%  {one['kernel']}")
    lines += ["", "begin us  us  idle before  kernel"]
    last = events[-(len(events) // steps) :]
    for before, (begin, end, name) in zip((None, *last), last, strict=False):
        idle = 0.0 if before is None else max(0.0, begin - before[1])
        lines.append(f"{begin - last[0][0]:9.1f} {end - begin:7.1f} {idle:7.1f}  {name[:90]}")
    return lines


def best_seconds(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The shortest time of some rounds, measured on a GPU by its own clock."""
    run()
    return min(_timed(run, device) for _ in range(rounds))


def _timed(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun
    make: Any = torch.cuda.Event
    begin, end = make(enable_timing=True), make(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000.0
