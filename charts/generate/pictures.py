"""Makes docs/dashboards/*.png: a real `headrace up` under load, scraped by a real Prometheus.

Only for developers; run by `make pictures`, takes about three minutes. Dashboards can be drawn from
another Prometheus too, as the cluster's test of scaling does for the operator's:
`pictures.py --url http://127.0.0.1:9090 --since 1764000000 --into FOLDER operator`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil

from dashboards import dashboards
from headrace_testing.headrace_up import UpProcess
from headrace_testing.prometheus import PrometheusServer, RedisExporter, Target
from headrace_testing.valkey import ValkeyServer
from render import Source, Span, render

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "dashboards"
LOCAL = ("overview", "service", "engines")
# Requests of each tenant, rate per second, seed. A repeated seed repeats prompts, which are then
# cached.
PHASES = (
    *(("40", "3", "1"), ("40", "3", "1"), ("150", "6", "2")),
    *(("300", "30", "3"), ("100", "5", "4")),
)
BATCH_REQUESTS = 1500
TENANTS = ("team-a", "team-b")
# The phase in which an engine is killed.
KILLED_IN = 2
GRAMMARS = 8
# Small enough that part of the fourth phase is refused.
QUEUE_BOUND = "100"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("wanted", nargs="*", default=LOCAL, help="names of dashboards")
    parser.add_argument("--url", help="a running Prometheus; without it, one is filled for this")
    parser.add_argument("--since", type=float, help="Unix time at which the pictures begin")
    parser.add_argument("--into", type=Path, default=PICTURES, help="folder of the pictures")
    options = parser.parse_args()
    if options.url:
        draw(options.url, Span(options.since, time.time()), options.wanted, options.into)
        return
    with tempfile.TemporaryDirectory() as folder:
        local(Path(folder), options.wanted, options.into)


def draw(url: str, span: Span, wanted: Sequence[str], into: Path) -> None:
    into.mkdir(parents=True, exist_ok=True)
    for dashboard in dashboards():
        if dashboard.name in wanted:
            render(dashboard, Source(url, span), into / f"{dashboard.name}.png")


def local(folder: Path, wanted: Sequence[str], into: Path) -> None:
    """Two engines and a gateway on this machine, loaded phase by phase by two tenants."""
    os.environ["HEADRACE_GATEWAY_MAX_QUEUED_REQUESTS"] = QUEUE_BOUND
    with ExitStack() as running:
        valkey = ValkeyServer(folder / "valkey", "--maxmemory", "256mb")
        valkey.start()
        running.callback(valkey.stop)
        exporter = RedisExporter(valkey.url, folder)
        running.callback(exporter.close)
        keys = folder / "keys.yaml"
        secrets = [create_key(keys, tenant) for tenant in TENANTS]
        engines = ("--engines", "2", "--redis", valkey.url)
        limits = ("--", "--num-blocks", "1024", "--max-num-seqs", "16", "--lease", "3")
        environment = {"HEADRACE_GATEWAY_API_KEYS_FILE": str(keys)}
        up = running.enter_context(UpProcess(folder, *engines, *limits, env=environment))
        up.until_served()
        targets = [*scraped(up), Target(exporter.port, {"namespace": "demo", "pod": "redis"})]
        prometheus = PrometheusServer(folder, targets)
        running.callback(prometheus.close)
        prometheus.await_ready()
        start = time.time()
        with httpx.Client(base_url=up.url, timeout=60) as http:
            begin_batch(http, secrets[0])
            for number, phase in enumerate(PHASES):
                loads = [begin_load(up.url, secret, *phase) for secret in secrets]
                refused(http, secrets[1])
                constrained(http, secrets[0], number)
                if number == KILLED_IN:
                    engine_of(up).kill()
                for one in loads:
                    one.wait()
        draw(f"http://127.0.0.1:{prometheus.port}", Span(start, time.time()), wanted, into)


def engine_of(up: UpProcess) -> psutil.Process:
    """One of the engines."""
    return next(child for child in up.children() if "headrace_engine" in child.cmdline())


def create_key(file: Path, tenant: str) -> str:
    command = [sys.executable, "-m", "headrace_cli", "keys", "create", tenant]
    command += ["--file", str(file), "--tenant", tenant]
    made = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    return made.stdout.split()[0]


def scraped(up: UpProcess) -> list[Target]:
    """Processes' metrics ports, from their logs."""
    return [
        Target(up.metrics_port(name), {"namespace": "demo", "pod": name})
        for name in ("engine-0", "engine-1", "gateway-0")
    ]


def begin_batch(http: httpx.Client, key: str) -> None:
    """Sends the load of all phases in the background."""
    body = {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 1.0}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps({"custom_id": str(number), **line}) for number in range(BATCH_REQUESTS)]
    form = {"file": ("batch.jsonl", "\n".join(lines).encode())}
    headers = {"Authorization": f"Bearer {key}"}
    uploaded = http.post("/v1/files", files=form, data={"purpose": "batch"}, headers=headers)
    batch = {"input_file_id": uploaded.json()["id"], "endpoint": "/v1/completions"}
    window = {**batch, "completion_window": "24h"}
    http.post("/v1/batches", json=window, headers=headers).raise_for_status()


def begin_load(url: str, key: str, requests: str, rate: str, seed: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "headrace_cli", "bench", "--url", url, "--warmup", "0"]
    command += ["--requests", requests, "--rate", rate, "--seed", seed, "--api-key", key]
    command += ["--prompt-tokens", "16-400", "--output-tokens", "16-160"]
    return subprocess.Popen(command)  # noqa: S603 - refused requests are wanted, and exit 1


def refused(http: httpx.Client, key: str) -> None:
    """Requests that show as errors: long prompts, a wrong key, a client that leaves."""
    headers = {"Authorization": f"Bearer {key}"}
    for _ in range(10):
        http.post("/v1/completions", json={"prompt": "long " * 4000}, headers=headers)
        http.post("/v1/completions", json={"prompt": "Hi"}, headers={"Authorization": "Bearer no"})
    body = {"prompt": "Once upon a time", "max_tokens": 400, "stream": True}
    with http.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
        next(stream.iter_lines())


def constrained(http: httpx.Client, key: str, number: int) -> None:
    """Answers by schemas that no gateway has seen before."""
    for each in range(GRAMMARS):
        schema = {"enum": [f"answer {number}.{each}"]}
        body = {"prompt": "Say", "max_tokens": 16, "structured_outputs": {"json": schema}}
        http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})


if __name__ == "__main__":
    main()
