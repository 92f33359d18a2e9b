"""Runs servers in turns, for peers.py: Headrace's whole stack and vLLM's server, on the same cores.

Each is started as its users start it and gets the same requests from `headrace bench`; all
processes of the other server are stopped meanwhile.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

START_TIMEOUT_S = 600.0
CONCURRENCY, REQUESTS = 32, 128
MAX_MODEL_LEN = 1024
VOCAB_SIZE = 32_000
# Figure of the report -> whether higher is better.
FIGURES: Mapping[str, bool] = {"requests_per_s": True, "ttft_p99_ms": False, "itl_p99_ms": False}


@dataclass
class ServerResult:
    """Figures of one server. `figures` hold one value a round, under the names of FIGURES."""

    workload: str
    engine: str
    figures: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in FIGURES})
    startup_s: float = 0.0
    rss_mb: int = 0

    def median(self, name: str) -> float:
        return median(self.figures[name])


class Server:
    """A server's process and the processes that it starts.

    Its creator must close it, also if `prepare` fails or is interrupted.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        verbose: bool,
    ) -> None:
        self.result = ServerResult("http-32", name)
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._begun = time.perf_counter()
        self._process = subprocess.Popen(
            command(port),
            stdin=subprocess.DEVNULL,
            stdout=None if verbose else subprocess.DEVNULL,
            stderr=None if verbose else subprocess.DEVNULL,
            start_new_session=True,
            env=dict(environment),
        )

    def prepare(self) -> None:
        """Waits until the server answers, then stops it until its turn."""
        self._await_ready()
        self.result.startup_s = time.perf_counter() - self._begun
        self._signal_all(signal.SIGSTOP)

    def turn(self, number: int) -> None:
        """Runs a round; adds its figures to `result`."""
        self._signal_all(signal.SIGCONT)
        self._await_ready()
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            command = [sys.executable, "-m", "headrace_cli", "bench", "--url", self._url]
            command += ["--out", str(report)]
            command += ["--requests", str(REQUESTS), "--concurrency", str(CONCURRENCY)]
            command += ["--vocab-size", str(VOCAB_SIZE), "--seed", str(number)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found = json.loads(report.read_text())
        self.result.figures["requests_per_s"].append(found["requests_per_s"])
        self.result.figures["ttft_p99_ms"].append(found["ttft_s"]["p99"] * 1e3)
        self.result.figures["itl_p99_ms"].append(found["itl_s"]["p99"] * 1e3)
        self.result.rss_mb = sum(one.memory_info().rss for one in self._all()) // 2**20
        self._signal_all(signal.SIGSTOP)

    def close(self) -> None:
        processes = self._all()
        self._signal_all(signal.SIGCONT)
        self._process.terminate()
        _, left = psutil.wait_procs(processes, timeout=30)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def _all(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        return []

    def _signal_all(self, number: int) -> None:
        for process in self._all():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _await_ready(self) -> None:
        """Waits until a request for one token is answered."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None:
                raise SystemExit(f"{self.result.engine}: ended with {self._process.returncode}")
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.result.engine}: not ready in {START_TIMEOUT_S:.0f} s")
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/v1/models", timeout=5) as answer:
                model = json.load(answer)["data"][0]["id"]
            body = {"model": model, "prompt": [5], "max_tokens": 1, "ignore_eos": True}
            request = urllib.request.Request(
                f"{self._url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60):
                return True
        except (OSError, urllib.error.URLError, IndexError):
            return False


def headrace_command(model: Path, folder: Path) -> Callable[[int], Sequence[str]]:
    def command(port: int) -> Sequence[str]:
        return [
            *(sys.executable, "-m", "headrace_cli", "up", "--model", str(model)),
            *("--port", str(port), "--data-dir", str(folder), "--"),
            *("--max-model-len", str(MAX_MODEL_LEN), "--no-enable-prefix-caching"),
        ]

    return command


def vllm_command(python: Path, model: Path, dtype: str) -> Callable[[int], Sequence[str]]:
    def command(port: int) -> Sequence[str]:
        return [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", dtype),
            *("--max-model-len", str(MAX_MODEL_LEN), "--no-enable-prefix-caching"),
            "--disable-uvicorn-access-log",
        ]

    return command


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays KeyboardInterrupt for SIGINT and SIGTERM to the end of the block.

    While a process is being started, no code could end it. The signals are not masked, because the
    process would inherit the mask.
    """
    caught: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(each, lambda number, _: caught.append(number)) for each in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
    if caught:
        raise KeyboardInterrupt


@contextmanager
def servers(
    model: Path, vllm: Path, dtype: str, vllm_environment: Mapping[str, str], verbose: bool
) -> Iterator[list[Server]]:
    """Headrace's stack, then vLLM's server with this dtype if it is installed."""
    running: list[Server] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            command = headrace_command(model, Path(folder))
            with uninterrupted():
                running.append(Server("headrace", command, os.environ, verbose))
            running[-1].prepare()
            if vllm.exists():
                peer = vllm_command(vllm, model, dtype)
                environment = {"VLLM_CPU_KVCACHE_SPACE": "2", **vllm_environment}
                with uninterrupted():
                    running.append(Server("vllm-tuned", peer, environment, verbose))
                running[-1].prepare()
            yield running
        finally:
            for server in running:
                server.close()


def compete(
    options: argparse.Namespace, dtype: str, vllm_environment: Mapping[str, str]
) -> list[ServerResult]:
    """Runs all rounds; returns the results, Headrace's first. `dtype` is vLLM's."""
    python = options.peers / "vllm" / "bin" / "python"
    with servers(
        options.peers / "models" / "small", python, dtype, vllm_environment, options.verbose
    ) as running:
        for number in range(options.rounds):
            for server in running:
                server.turn(number)
                latest = {name: each[-1] for name, each in server.result.figures.items()}
                shown = "  ".join(f"{name} {value:.1f}" for name, value in latest.items())
                print(
                    f"{'http-32':14}round {number + 1}/{options.rounds}  "
                    f"{server.result.engine:18}{shown}",
                    file=sys.stderr,
                )
        return [server.result for server in running]


def ratios(results: Sequence[ServerResult]) -> dict[str, float]:
    """How many times better Headrace is than each peer, by `http-32-figure/peer`."""
    if not results:
        return {}
    ours, *theirs = results
    return {
        f"http-32-{name}/{peer.engine}": (
            ours.median(name) / peer.median(name) if more else peer.median(name) / ours.median(name)
        )
        for peer in theirs
        for name, more in FIGURES.items()
    }


def show(results: Sequence[ServerResult]) -> None:
    for result in results:
        figures = "  ".join(
            f"{name} {result.median(name):.1f} ({min(each):.1f}-{max(each):.1f})"
            for name, each in result.figures.items()
        )
        print(f"{result.workload:14}{result.engine:18}{figures}  {result.rss_mb} MB")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
