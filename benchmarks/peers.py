"""Compares Headrace with vLLM and llama.cpp in one run: every engine in its own process, in turns.

    python benchmarks/peers.py --peers DIR [--rounds 3] [--only small-64,half-1] [--json FILE]

DIR (or $PEERS) holds the peers and the models, see benchmarks/README.md. What is not there is named
and left out. Each round has new prompts of the same lengths; an engine that is not at its turn is
stopped. Printed are medians, minimum, maximum, and ratios: how many times better Headrace is.

Headrace has the dtype that it chooses by itself, llama.cpp that of the file. vLLM has the one that
is fastest on this machine, which is tried with each model.
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
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil
import torch

import peer_servers
from cpu_kernels import measure_roofs
from headrace_engine.kernels.cpu import library

CHILD = Path(__file__).with_name("peer_engines.py")
LONG_PROMPT, LONG_COUNT, LONG_CONTEXT = 8000, 8, 8192
SINGLE_PROMPT, SINGLE_OUTPUT = 32, 128
SINGLE_REPEATS = 3
# A dtype whose start and round take this many times as long as the first one's is too slow.
TOO_SLOW = 3
VOCAB_SIZE = 32_000
# Where distributions install the allocator that vLLM's documentation recommends.
TCMALLOC = ("/usr/lib/*/libtcmalloc_minimal.so.4", "/usr/lib64/libtcmalloc_minimal.so.4")


@dataclass(frozen=True)
class Engine:
    """`child` is the name in peer_engines.py. `venv` None is Headrace's own environment. The
    fastest of `dtypes` is found before the first workload of each model."""

    name: str
    child: str
    venv: str | None
    weights: str = "bf16"
    suffix: str = ""  # of the model's file, if it is not the checkpoint
    compiles: bool = True  # only vLLM may not
    dtypes: tuple[str, ...] = ("auto",)


HEADRACE = Engine("headrace", "headrace", None)
HEADRACE_INT8 = Engine("headrace-int8", "headrace", None, weights="int8")
VLLM = Engine("vllm-tuned", "vllm", "vllm", dtypes=("float32", "bfloat16"))
VLLM_EAGER = replace(VLLM, name="vllm-eager", compiles=False)
LLAMA_BF16 = Engine("llama.cpp-bf16", "llama.cpp", "lcpp", suffix="-bf16.gguf", dtypes=("file",))
LLAMA_Q8 = Engine("llama.cpp-q8_0", "llama.cpp", "lcpp", suffix="-q8_0.gguf", dtypes=("file",))
LLAMA_Q4 = Engine("llama.cpp-q4_k_m", "llama.cpp", "lcpp", suffix="-q4_k_m.gguf", dtypes=("file",))
# The same files in both engines.
HEADRACE_Q8 = Engine("headrace-q8_0", "headrace", None, suffix=LLAMA_Q8.suffix)
HEADRACE_Q4 = Engine("headrace-q4_k_m", "headrace", None, suffix=LLAMA_Q4.suffix)


@dataclass(frozen=True)
class Workload:
    """`kind` is batch (all requests at once), single (the decoding of one request) or long
    (prefill)."""

    name: str
    model: str
    kind: str
    requests: int
    engines: tuple[Engine, ...]

    @property
    def unit(self) -> str:
        return "prompt tok/s" if self.kind == "long" else "output tok/s"

    @property
    def max_model_len(self) -> int:
        return LONG_CONTEXT if self.kind == "long" else 1024


WORKLOADS = (
    Workload("small-64", "small", "batch", 64, (HEADRACE, VLLM)),
    Workload("half-16", "half", "batch", 16, (HEADRACE, VLLM)),
    Workload("half-64", "half", "batch", 64, (HEADRACE, VLLM)),
    Workload("small-1", "small", "single", 1, (HEADRACE, LLAMA_BF16, VLLM)),
    Workload("half-1", "half", "single", 1, (HEADRACE, LLAMA_BF16, VLLM)),
    Workload("small-1-int8", "small", "single", 1, (HEADRACE_INT8, LLAMA_Q8)),
    Workload("half-1-int8", "half", "single", 1, (HEADRACE_INT8, LLAMA_Q8)),
    Workload("small-1-q8_0", "small", "single", 1, (HEADRACE_Q8, LLAMA_Q8)),
    Workload("half-1-q8_0", "half", "single", 1, (HEADRACE_Q8, LLAMA_Q8)),
    Workload("small-1-q4_k_m", "small", "single", 1, (HEADRACE_Q4, LLAMA_Q4)),
    Workload("half-1-q4_k_m", "half", "single", 1, (HEADRACE_Q4, LLAMA_Q4)),
    Workload("small-long", "small", "long", LONG_COUNT, (HEADRACE, VLLM)),
    Workload("latent-16", "latent", "batch", 16, (HEADRACE, VLLM, VLLM_EAGER)),
    Workload("recurrent-16", "recurrent", "batch", 16, (HEADRACE, VLLM, VLLM_EAGER)),
)
HTTP = "http-32"  # the servers, see peer_servers.py


def jobs(workload: Workload, number: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths of a round: the same lengths, but other tokens in every round."""
    lengths, tokens = np.random.default_rng(0), np.random.default_rng(number + 1)
    prompts, outputs = lengths.integers(16, 513, 64), lengths.integers(16, 129, 64)
    if workload.kind == "long":
        prompts, outputs = np.full(LONG_COUNT, LONG_PROMPT), np.ones(LONG_COUNT, dtype=int)
    if workload.kind == "single":
        prompts, outputs = np.full(1, SINGLE_PROMPT), np.full(1, SINGLE_OUTPUT)
    drawn = [tokens.integers(3, VOCAB_SIZE, int(length)).tolist() for length in prompts]
    return drawn[: workload.requests], outputs[: workload.requests].tolist()


@dataclass
class Result:
    """Speeds of one engine in one workload. `rates` are tokens per second, one for each round."""

    workload: str
    engine: str
    dtype: str
    rates: list[float] = field(default_factory=list)
    startup_s: float = 0.0
    rss_mb: int = 0

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


class EngineEndedError(Exception):
    """An engine's process has ended, for example since it does not know the model."""


class Contestant:
    """An engine's process and the processes that it starts; stopped while others have their turn.

    Its creator must close it, also if `prepare` fails or is interrupted.
    """

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        model: Path,
        dtype: str,
        options: argparse.Namespace,
    ) -> None:
        self.result = Result(workload.name, engine.name, dtype)
        self._workload = workload
        python = _python(engine, options.peers)
        command = [str(python), "-P", str(CHILD), engine.child, "--model", str(model)]
        command += ["--weights", engine.weights, "--dtype", dtype]
        command += ["--threads", str(options.threads)]
        command += ["--max-model-len", str(workload.max_model_len)]
        command += [] if engine.compiles else ["--eager"]
        self._begun = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if options.verbose else subprocess.DEVNULL,
            text=True,
            bufsize=1,
            start_new_session=True,
            env=_environment(engine, options),
        )

    def prepare(self) -> None:
        """Waits until the engine is ready, then stops it. Raises EngineEndedError."""
        self._answer()
        self.result.startup_s = time.perf_counter() - self._begun
        self._signal(signal.SIGSTOP)

    def turn(self, number: int) -> float:
        """Runs a round; returns tokens per second."""
        prompts, outputs = jobs(self._workload, number)
        self._signal(signal.SIGCONT)
        if self._workload.kind == "single":
            rate = self._decode_rate(prompts, outputs[0])
        else:
            counted = prompts if self._workload.kind == "long" else [[0] * n for n in outputs]
            rate = sum(map(len, counted)) / self._run(prompts, outputs)
        self.result.rss_mb = self._resident()
        self._signal(signal.SIGSTOP)
        self.result.rates.append(rate)
        return rate

    @contextmanager
    def limited(self, seconds: float | None) -> Iterator[None]:
        """Ends the engine if the block takes longer."""
        timer = threading.Timer(seconds or threading.TIMEOUT_MAX, self._signal, (signal.SIGKILL,))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def close(self) -> None:
        with self._process:  # closes the pipes and waits
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGKILL)

    def _decode_rate(self, prompts: list[list[int]], count: int) -> float:
        """Tokens per second after the first token, whose time belongs to the prompt."""
        first = [self._run(prompts, [1]) for _ in range(SINGLE_REPEATS)]
        whole = [self._run(prompts, [count]) for _ in range(SINGLE_REPEATS)]
        return (count - 1) / (statistics.median(whole) - statistics.median(first))

    def _run(self, prompts: list[list[int]], outputs: list[int]) -> float:
        print(
            json.dumps({"prompts": prompts, "outputs": outputs}),
            file=_pipe(self._process.stdin),
            flush=True,
        )
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise EngineEndedError(
                f"{self.result.workload}: {self.result.engine} ended with "
                f"{self._process.wait()}; --verbose shows its output"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it ended by itself
            os.killpg(self._process.pid, number)

    def _resident(self) -> int:
        """The memory of the process and those that it started, in MB."""
        root = psutil.Process(self._process.pid)
        total = sum(one.memory_info().rss for one in (root, *root.children(recursive=True)))
        return int(total / 2**20)


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _python(engine: Engine, peers: Path) -> Path:
    return Path(sys.executable) if engine.venv is None else peers / engine.venv / "bin" / "python"


def _model(engine: Engine, workload: Workload, peers: Path) -> Path:
    return peers / "models" / (workload.model + engine.suffix)


def _environment(engine: Engine, options: argparse.Namespace) -> dict[str, str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if engine.child == "vllm":
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "LD_PRELOAD": ":".join(map(str, preloads(options.peers))),
        }
    return environment


def preloads(peers: Path) -> list[Path]:
    """The libraries that vLLM's documentation recommends to preload on CPUs, if they are
    installed."""
    found = [path for pattern in TCMALLOC for path in sorted(Path("/").glob(pattern[1:]))][:1]
    return [*found, *sorted((peers / "vllm" / "lib").glob("libiomp5.so"))]


@contextmanager
def lengthened(model: Path, workload: Workload, scratch: Path) -> Iterator[Path]:
    """A copy of the checkpoint with a context as long as the workload needs."""
    config_file = model / "config.json"
    if not config_file.is_file():
        yield model
        return
    config = json.loads(config_file.read_text())
    if config["max_position_embeddings"] >= workload.max_model_len:
        yield model
        return
    folder = scratch / f"{model.name}-{workload.max_model_len}"
    folder.mkdir(exist_ok=True)
    for file in model.iterdir():
        link = folder / file.name
        if not link.exists() and file.name != "config.json":
            link.symlink_to(file.resolve())
    config["max_position_embeddings"] = workload.max_model_len
    (folder / "config.json").write_text(json.dumps(config))
    yield folder


def missing(engine: Engine, workload: Workload, peers: Path) -> str | None:
    """Why an engine cannot take part, or None."""
    for path in (_python(engine, peers), _model(engine, workload, peers)):
        if not path.exists():
            return f"{workload.name}: {engine.name} left out, there is no {path}"
    return None


Chosen = dict[tuple[str, str], str]
"""The dtype with which an engine is fastest, by the engine's and the model's name."""


def choose_dtype(
    engine: Engine,
    workload: Workload,
    model: Path,
    options: argparse.Namespace,
    chosen: Chosen,
) -> str:
    """The engine's fastest dtype, by a round of this workload if the model has had none before.

    Raises EngineEndedError if the engine runs with none of them.
    """
    key = engine.name, workload.model
    if len(engine.dtypes) == 1 or key in chosen:
        return chosen.get(key, engine.dtypes[0])
    rates: dict[str, float] = {}
    limit = None
    for dtype in engine.dtypes:
        begun = time.perf_counter()
        with ExitStack() as stack:
            with peer_servers.uninterrupted():
                contestant = Contestant(engine, workload, model, dtype, options)
                stack.callback(contestant.close)
            try:
                with contestant.limited(limit):
                    contestant.prepare()
                    rates[dtype] = contestant.turn(options.rounds)
                limit = limit or TOO_SLOW * (time.perf_counter() - begun)
                found = f"{rates[dtype]:10.1f} {workload.unit}"
            except EngineEndedError as error:
                ended, found = error, "did not run, or took too long"
        print(f"{workload.model:14}{dtype:11}  {engine.name:18}{found}", file=sys.stderr)
    if not rates:
        raise ended
    chosen[key] = max(rates, key=lambda dtype: rates[dtype])
    return chosen[key]


def compete(
    workload: Workload, options: argparse.Namespace, scratch: Path, chosen: Chosen
) -> tuple[list[Result], list[str]]:
    """The results of a workload, Headrace's first, and the reasons why others were left out."""
    reasons = {
        engine.name: reason
        for engine in workload.engines
        if (reason := missing(engine, workload, options.peers))
    }
    present = [engine for engine in workload.engines if engine.name not in reasons]
    if not present or present[0].child != "headrace":
        return [], list(reasons.values())
    contestants: list[Contestant] = []
    ready: list[Contestant] = []
    try:
        for engine in present:
            with lengthened(_model(engine, workload, options.peers), workload, scratch) as model:
                try:
                    dtype = choose_dtype(engine, workload, model, options, chosen)
                    with peer_servers.uninterrupted():
                        contestants.append(Contestant(engine, workload, model, dtype, options))
                    contestants[-1].prepare()
                    ready.append(contestants[-1])
                except EngineEndedError as error:
                    if engine.child == "headrace":
                        raise SystemExit(str(error)) from error
                    reasons[engine.name] = str(error)
        for number in range(options.rounds):
            for contestant in ready:
                rate = contestant.turn(number)
                print(
                    f"{workload.name:14}round {number + 1}/{options.rounds}  "
                    f"{contestant.result.engine:18}{rate:10.1f} {workload.unit}",
                    file=sys.stderr,
                )
    finally:
        for contestant in contestants:
            contestant.close()
    return [contestant.result for contestant in ready], list(reasons.values())


def compete_served(options: argparse.Namespace, chosen: Chosen) -> list[peer_servers.ServerResult]:
    """The servers' results, Headrace's first; vLLM's has its fastest dtype."""
    dtype = VLLM.dtypes[0]
    if not missing(VLLM, WORKLOADS[0], options.peers):
        model = _model(VLLM, WORKLOADS[0], options.peers)
        dtype = choose_dtype(VLLM, WORKLOADS[0], model, options, chosen)
    return peer_servers.compete(options, dtype, _environment(VLLM, options))


def ratios(results: Sequence[Result]) -> dict[str, float]:
    """Headrace relative to each peer, by `workload/peer`; inverted for start-up time and memory,
    where lower is better."""
    found: dict[str, float] = {}
    by_workload: dict[str, list[Result]] = {}
    for result in results:
        by_workload.setdefault(result.workload, []).append(result)
    for name, (ours, *theirs) in by_workload.items():
        for peer in theirs:
            found[f"{name}/{peer.engine}"] = ours.rate / peer.rate
            found[f"startup-{name}/{peer.engine}"] = peer.startup_s / ours.startup_s
            found[f"memory-{name}/{peer.engine}"] = peer.rss_mb / ours.rss_mb
    return found


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = " ".join(line for line in lines[:64] if line.startswith("flags"))
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "features": [
            name
            for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
            if f" {name} " in f"{flags} "
        ],
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "load_1m": os.getloadavg()[0],
        "kernels": library.load().isa,
    }


def show_machine(found: dict[str, Any], rounds: int) -> None:
    roofs = found["roofs"]
    print(
        f"{found['processor']} ({found['kernels']}), {found['cores']} cores, {rounds} rounds; "
        f"memory {roofs['bandwidth']:.1f} GB/s, "
        f"products {roofs['products']:.0f} GFLOP/s ({roofs['products_by']})"
    )


def show(results: Sequence[Result], found: dict[str, float]) -> None:
    print(
        f"{'workload':14}{'engine':18}{'dtype':9}{'tok/s':>9}{'min-max':>18}{'x':>7}"
        f"{'start s':>9}{'MB':>7}"
    )
    for result in results:
        spread = f"{min(result.rates):.1f}-{max(result.rates):.1f}"
        ratio = found.get(f"{result.workload}/{result.engine}")
        print(
            f"{result.workload:14}{result.engine:18}{result.dtype:9}{result.rate:9.1f}{spread:>18}"
            f"{'' if ratio is None else f'{ratio:.2f}':>7}{result.startup_s:9.1f}{result.rss_mb:7}"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=Path, default=os.environ.get("PEERS", ".peers"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="comma-separated workloads; all if not given")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="file to write the report to")
    parser.add_argument("--verbose", action="store_true", help="show what the engines print")
    options = parser.parse_args()
    options.peers = Path(options.peers).resolve()
    names = [*(one.name for one in WORKLOADS), HTTP]
    wanted = options.only.split(",") if options.only else names
    unknown = set(wanted) - set(names)
    if unknown:
        parser.error(f"--only: unknown workload {sorted(unknown)[0]}")
    options.workloads = [one for one in WORKLOADS if one.name in wanted]
    options.http = HTTP in wanted
    return options


def main() -> None:
    options = arguments()
    described, results, chosen = machine(), list[Result](), Chosen()
    with tempfile.TemporaryDirectory() as scratch:
        for workload in options.workloads:
            found, reasons = compete(workload, options, Path(scratch), chosen)
            results += found
            for reason in reasons:
                print(reason, file=sys.stderr)
    served = compete_served(options, chosen) if options.http else []
    found_ratios = ratios(results) | peer_servers.ratios(served)
    if results or served:
        described["roofs"] = asdict(measure_roofs(torch.bfloat16, rounds=5))
        show_machine(described, options.rounds)
    show(results, found_ratios)
    peer_servers.show(served)
    if options.json is not None:
        report = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": described,
            "threads": options.threads,
            "rounds": options.rounds,
            "ratios": found_ratios,
            "results": [asdict(result) | {"rate": result.rate} for result in results],
            "servers": [asdict(result) for result in served],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    # Ends the engines as Ctrl-C would: they have sessions of their own and would continue.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
