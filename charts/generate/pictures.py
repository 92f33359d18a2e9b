"""Makes docs/dashboards/*.png: a real `headrace up` under load, scraped by a real Prometheus.

Only for developers; run by `make pictures`, takes about three minutes. The operator's dashboard is
drawn from a cluster's Prometheus: `pictures.py http://127.0.0.1:9090 operator`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx

from dashboards import dashboards
from headrace_dashboards.panel import Dashboard
from headrace_testing.headrace_up import UpProcess
from headrace_testing.prometheus import PrometheusServer, RedisExporter, Target
from headrace_testing.valkey import ValkeyServer
from render import Source, Span, render

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "dashboards"
LOCAL = ("service", "engines")
LAST_SECONDS = 15 * 60
# Requests, a second, seed. The same seed again: its prompts are in the prefix cache.
PHASES = (
    *(("70", "4", "1"), ("70", "4", "1"), ("300", "9", "2")),
    *(("600", "60", "3"), ("200", "8", "4")),
)
BATCH_REQUESTS = 1500
# So few that the fourth phase is refused in part.
QUEUE_BOUND = "100"


def main() -> None:
    if len(sys.argv) > 1:
        url, *wanted = sys.argv[1:]
        draw(url, Span(time.time() - LAST_SECONDS, time.time(), 60), tuple(wanted))
        return
    with tempfile.TemporaryDirectory() as folder:
        local(Path(folder))


def draw(url: str, span: Span, wanted: tuple[str, ...]) -> None:
    PICTURES.mkdir(exist_ok=True)
    for dashboard in chosen(wanted):
        render(dashboard, Source(url, span), PICTURES / f"{dashboard.name}.png")


def chosen(wanted: tuple[str, ...]) -> list[Dashboard]:
    return [each for each in dashboards() if each.name in wanted or not wanted]


def local(folder: Path) -> None:
    """Two engines and a gateway on this machine, loaded phase by phase."""
    os.environ["HEADRACE_GATEWAY_MAX_QUEUED_REQUESTS"] = QUEUE_BOUND
    with ExitStack() as running:
        valkey = ValkeyServer(folder / "valkey", "--maxmemory", "256mb")
        valkey.start()
        running.callback(valkey.stop)
        exporter = RedisExporter(valkey.url, folder)
        running.callback(exporter.close)
        engines = ("--engines", "2", "--redis", valkey.url)
        limits = ("--", "--num-blocks", "1024", "--max-num-seqs", "16")
        up = running.enter_context(UpProcess(folder, *engines, *limits))
        up.until_served()
        targets = [*scraped(up), Target(exporter.port, {"namespace": "demo", "pod": "redis"})]
        prometheus = PrometheusServer(folder, targets)
        running.callback(prometheus.close)
        prometheus.await_ready()
        start = time.time()
        begin_batch(up.url)
        for phase in PHASES:
            load(up.url, *phase)
        draw(f"http://127.0.0.1:{prometheus.port}", Span(start, time.time()), LOCAL)


def scraped(up: UpProcess) -> list[Target]:
    """Processes' metrics ports, from their logs."""
    return [
        Target(up.metrics_port(name), {"namespace": "demo", "pod": name})
        for name in ("engine-0", "engine-1", "gateway-0")
    ]


def begin_batch(url: str) -> None:
    """Draws the load of all phases in the background."""
    body = {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 1.0}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps({"custom_id": str(number), **line}) for number in range(BATCH_REQUESTS)]
    with httpx.Client(base_url=url) as http:
        form = {"file": ("batch.jsonl", "\n".join(lines).encode())}
        uploaded = http.post("/v1/files", files=form, data={"purpose": "batch"})
        batch = {"input_file_id": uploaded.json()["id"], "endpoint": "/v1/completions"}
        http.post("/v1/batches", json={**batch, "completion_window": "24h"}).raise_for_status()


def load(url: str, requests: str, rate: str, seed: str) -> None:
    command = [sys.executable, "-m", "headrace_cli", "bench", "--url", url, "--warmup", "0"]
    command += ["--requests", requests, "--rate", rate, "--seed", seed]
    command += ["--prompt-tokens", "16-400", "--output-tokens", "16-160"]
    subprocess.run(command, check=False)  # noqa: S603 - refused requests are wanted, and exit 1


if __name__ == "__main__":
    main()
