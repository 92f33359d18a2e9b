"""Offline throughput: compares Headrace's LLM with transformers in one run, in turns.

    python benchmarks/offline.py [--model DIR | --shape llama] [--requests 64] [--rounds 3]
        [--peers transformers-static,transformers-continuous]
        [--features int8,prefix-caching,ngram,lora,async-scheduling,everything] [--json FILE]

Every engine runs in a process of its own, so that each has its own threads and memory, and they
take turns: one round each, then the next. Prompts have 16-512 tokens, outputs 16-128, greedy, the
end-of-sequence token ignored. Without --model a model with random weights is made: `llama` has 42 M
parameters, `latent` (DeepSeek V2 Lite) and `recurrent` (Qwen 3.5) have 0.4 B.
--features compares Headrace with itself instead: see offline_features.py.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from offline_features import FEATURES, WORKLOADS, Feature, Options, Work
from offline_models import MODELS, make_model

HEADRACE = "headrace"
PEERS = ("transformers-static", "transformers-continuous")
STATIC_BATCH = 16
# Not batched_mm: it copies the weights of each row's experts, gigabytes for a prompt.
EXPERTS = ("eager", "grouped_mm")
# Freed memory is kept: otherwise transformers spends half of its time in the kernel, which maps and
# clears memory for every large tensor.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34)}

Run = Callable[[Sequence[Work]], list[list[int]]]


def headrace_runner(model: str, dtype: str, threads: int) -> Run:
    return _headrace(model, dtype, threads, {}, {}, tokenizer=False)


def feature_runner(feature: Feature, enabled: bool) -> Callable[[str, str, int], Run]:
    def make(model: str, dtype: str, threads: int) -> Run:
        if not enabled:
            return _headrace(model, dtype, threads, feature.off, {}, tokenizer=False)
        return _headrace(
            model, dtype, threads, feature.on, feature.sampling, tokenizer=feature.tokenizer
        )

    return make


def _headrace(
    model: str, dtype: str, threads: int, options: Options, sampling: Options, *, tokenizer: bool
) -> Run:
    from headrace_engine import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, threads=threads, skip_tokenizer_init=not tokenizer, **options)

    def run(work: Sequence[Work]) -> list[list[int]]:
        outputs = llm.generate(
            [{"prompt_token_ids": item.prompt} for item in work],
            [
                SamplingParams(
                    temperature=0, max_tokens=item.output_tokens, ignore_eos=True, **sampling
                )
                for item in work
            ],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run


def _transformers_model(model: str, dtype: str, threads: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    net: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    return net.eval()


def static_runner(model: str, dtype: str, threads: int) -> Run:
    import torch

    net = _transformers_model(model, dtype, threads)
    if net._can_set_experts_implementation():
        use_fastest_experts(net)

    def batch(items: Sequence[Work]) -> list[list[int]]:
        width = max(len(item.prompt) for item in items)
        longest = max(item.output_tokens for item in items)
        pads = [width - len(item.prompt) for item in items]
        ids = torch.tensor([[0] * pad + item.prompt for pad, item in zip(pads, items, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        generated = net.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return [
            generated[row, width : width + item.output_tokens].tolist()
            for row, item in enumerate(items)
        ]

    def run(work: Sequence[Work]) -> list[list[int]]:
        outputs: list[list[int]] = []
        for start in range(0, len(work), STATIC_BATCH):
            outputs += batch(work[start : start + STATIC_BATCH])
        return outputs

    return run


def use_fastest_experts(net: Any) -> None:
    """Chooses transformers' fastest way to compute the experts of a mixture: the time of one
    prompt and a few tokens of each sequence decides."""
    import torch

    ids = torch.ones(STATIC_BATCH, 64, dtype=torch.long)
    seconds: dict[str, float] = {}
    for name in EXPERTS:
        net.set_experts_implementation(name)
        for _ in range(2):  # the second time counts
            begin = time.perf_counter()
            net.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=8,
                min_new_tokens=8,
                do_sample=False,
                pad_token_id=0,
            )
            seconds[name] = time.perf_counter() - begin
    times = ", ".join(f"{name} {spent:.2f} s" for name, spent in seconds.items())
    print(f"transformers' experts: {times}", file=sys.stderr)
    net.set_experts_implementation(min(seconds, key=seconds.__getitem__))


def continuous_runner(model: str, dtype: str, threads: int) -> Run:
    import transformers
    from transformers.generation.continuous_batching.utils import WorkloadHints

    net = _transformers_model(model, dtype, threads)
    make_config: Any = transformers.GenerationConfig
    config = make_config(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=128)
    hints = WorkloadHints(max_prompt_length=512, max_generated_length=128, num_requests=64)
    manager = net.init_continuous_batching(generation_config=config, workload_hints=hints)
    manager.start()

    def run(work: Sequence[Work]) -> list[list[int]]:
        ids = [manager.add_request(item.prompt, max_new_tokens=item.output_tokens) for item in work]
        results: dict[str, list[int]] = {}
        while len(results) < len(ids):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                results[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped")
        return [results[request_id] for request_id in ids]

    return run


RUNNERS: dict[str, Callable[[str, str, int], Run]] = {
    HEADRACE: headrace_runner,
    "transformers-static": static_runner,
    "transformers-continuous": continuous_runner,
    **{f"{name}-off": feature_runner(each, False) for name, each in FEATURES.items()},
    **{f"{name}-on": feature_runner(each, True) for name, each in FEATURES.items()},
}


def child(options: argparse.Namespace) -> None:
    """The process of one engine: loads, warms up, then runs the workload once for each line on
    stdin."""
    engine, model = options.child, options.model
    make_work = WORKLOADS[options.work]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    vocab_size = int(json.loads((Path(model) / "config.json").read_text())["vocab_size"])
    started = time.perf_counter()
    run = RUNNERS[engine](model, options.dtype, options.threads)
    run([Work(item.prompt[:16], 4) for item in WORKLOADS["mixed"](4, vocab_size, -1)])
    answers.write(json.dumps({"load_s": time.perf_counter() - started}) + "\n")
    for line in sys.stdin:
        work = make_work(options.requests, vocab_size, int(line))
        begin = time.perf_counter()
        outputs = run(work)
        seconds = time.perf_counter() - begin
        wanted = [item.output_tokens for item in work]
        if [len(output) for output in outputs] != wanted:
            raise RuntimeError(f"{engine} did not generate what was asked for")
        answers.write(json.dumps({"seconds": seconds, "rss_mb": _rss_mb()}) + "\n")
    os._exit(0)  # a thread of transformers' manager would keep the process alive


def _rss_mb() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss / 2**20)


class Contestant:
    """The parent's side of an engine's process, which is stopped while others have their turn."""

    def __init__(self, engine: str, options: argparse.Namespace, model: str, work: str) -> None:
        self.engine = engine
        self.seconds: list[float] = []
        self.rss_mb = 0
        command = [sys.executable, __file__, "--child", engine, "--model", model]
        command += ["--dtype", options.dtype, "--threads", str(options.threads)]
        command += ["--requests", str(options.requests), "--work", work]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**MALLOC, **os.environ},
        )
        self.load_s = 0.0

    def starts(self) -> bool:
        """Waits until the engine has loaded the model; False if it cannot run it."""
        line = _pipe(self._process.stdout).readline()
        if not line:
            print(f"{self.engine} cannot run this model; see above", file=sys.stderr)
            self._process.wait()
            return False
        self.load_s = float(json.loads(line)["load_s"])
        self._process.send_signal(signal.SIGSTOP)
        return True

    def run(self, number: int) -> float:
        self._process.send_signal(signal.SIGCONT)
        print(number, file=_pipe(self._process.stdin), flush=True)
        answer = self._answer()
        self._process.send_signal(signal.SIGSTOP)
        self.seconds.append(float(answer["seconds"]))
        self.rss_mb = int(answer["rss_mb"])
        return self.seconds[-1]

    def close(self) -> None:
        """Ends the engine's process."""
        self._process.send_signal(signal.SIGCONT)
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise SystemExit(f"{self.engine} ended with {self._process.wait()}; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _pipe(stream: Any) -> TextIO:
    assert stream is not None
    pipe: TextIO = stream
    return pipe


@dataclass(frozen=True)
class Result:
    engine: str
    output_tokens_per_s: float
    seconds: float
    seconds_min: float
    seconds_max: float
    load_s: float
    rss_mb: int


def compare(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Returns the report: with features, one pair of engines for each; otherwise Headrace and its
    peers."""
    races = [(FEATURES[name].work, [f"{name}-on", f"{name}-off"]) for name in options.features]
    if not options.features:
        races = [("mixed", [HEADRACE, *options.peers])]
    report: dict[str, Any] = {
        "results": [],
        "ratios": {},
        "workload": {
            "requests": options.requests,
            "dtype": options.dtype,
            "threads": options.threads,
            "rounds": options.rounds,
        },
        "machine": {"processor": _processor(), "cores": os.cpu_count()},
    }
    for work, engines in races:
        ours, *others = race(options, model, work, engines)
        report["results"] += [asdict(result) for result in (ours, *others)]
        for other in others:
            ratio = ours.output_tokens_per_s / other.output_tokens_per_s
            report["ratios"][f"{ours.engine}/{other.engine}"] = ratio
    return report


def race(
    options: argparse.Namespace, model: str, work: str, engines: Sequence[str]
) -> list["Result"]:
    """Runs all rounds of engines that take turns on one kind of work."""
    vocab_size = int(json.loads((Path(model) / "config.json").read_text())["vocab_size"])
    jobs = WORKLOADS[work](options.requests, vocab_size, 0)
    tokens = sum(item.output_tokens for item in jobs)
    with ExitStack() as running:
        contestants = [
            running.enter_context(closing(contestant))
            for contestant in (Contestant(engine, options, model, work) for engine in engines)
            if contestant.starts()
        ]
        if [each.engine for each in contestants][:1] != engines[:1]:
            raise SystemExit(f"{engines[0]} did not start; see above")
        for number in range(options.rounds):
            for contestant in contestants:
                seconds = contestant.run(number)
                print(
                    f"round {number + 1}/{options.rounds}  {contestant.engine:26}"
                    f"{seconds:8.2f} s {tokens / seconds:9.1f} tok/s",
                    file=sys.stderr,
                )
    return [_result(contestant, tokens) for contestant in contestants]


def _result(contestant: Contestant, tokens: int) -> Result:
    seconds = statistics.median(contestant.seconds)
    return Result(
        engine=contestant.engine,
        output_tokens_per_s=tokens / seconds,
        seconds=seconds,
        seconds_min=min(contestant.seconds),
        seconds_max=max(contestant.seconds),
        load_s=contestant.load_s,
        rss_mb=contestant.rss_mb,
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def show(report: dict[str, Any]) -> None:
    work = report["workload"]
    print(
        f"{work['requests']} requests, {work['dtype']}, {work['threads']} threads, "
        f"{report['machine']['processor']}"
    )
    print(
        f"{'engine':28}{'out tok/s':>10}{'s (median)':>12}{'min-max':>16}{'load s':>8}{'RSS MB':>8}"
    )
    for row in report["results"]:
        spread = f"{row['seconds_min']:.2f}-{row['seconds_max']:.2f}"
        print(
            f"{row['engine']:28}{row['output_tokens_per_s']:10.1f}{row['seconds']:12.2f}"
            f"{spread:>16}{row['load_s']:8.1f}{row['rss_mb']:8}"
        )
    for names, ratio in report["ratios"].items():
        print(f"{names}: {ratio:.2f}x")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="folder of a checkpoint")
    parser.add_argument("--shape", choices=MODELS, default="llama", help="model without --model")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated; may be empty")
    parser.add_argument("--features", default="", help=f"of {', '.join(FEATURES)}")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="file to write the report to")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.peers = [peer for peer in options.peers.split(",") if peer]
    unknown = set(options.peers) - set(PEERS)
    if unknown:
        parser.error(f"--peers: {', '.join(sorted(unknown))} is not one of {', '.join(PEERS)}")
    options.features = [name for name in options.features.split(",") if name]
    unknown = set(options.features) - set(FEATURES)
    if unknown:
        parser.error(
            f"--features: {', '.join(sorted(unknown))} is not one of {', '.join(FEATURES)}"
        )
    return options


def main() -> None:
    options = arguments()
    if options.child:
        child(options)
        return
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model
        if model is None:
            model = scratch
            make_model(Path(scratch), options.shape)
        report = compare(options, model)
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
