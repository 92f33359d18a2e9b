"""A real Prometheus for tests, with the chart's rules, and the exporter of Redis.

Debian packages: prometheus (with promtool) and prometheus-redis-exporter.
"""

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .needs import missing
from .processes import until
from .valkey import free_port

PROMETHEUS = "prometheus"
PROMTOOL = "promtool"
REDIS_EXPORTER = "prometheus-redis-exporter"


def require_program(name: str) -> str:
    """The path of a program; skips the test without it, or fails it in CI."""
    if found := shutil.which(name):
        return found
    missing(f"{name}: make system-packages")


class Program:
    """A program of the system, its log in a file; killed by `close`."""

    def __init__(self, name: str, *arguments: str, log: Path) -> None:
        self.log = log
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                [require_program(name), *arguments],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "GOMAXPROCS": "1"},
            )

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def close(self) -> None:
        if self.alive:
            self._popen.kill()
        self._popen.wait()


class RedisExporter(Program):
    """Exports a Redis' state as Prometheus metrics on `port`."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self.port = free_port()
        super().__init__(
            REDIS_EXPORTER,
            f"-redis.addr={redis_url.removesuffix('/0')}",
            f"-web.listen-address=127.0.0.1:{self.port}",
            log=folder / "redis-exporter.log",
        )


@dataclass(frozen=True, slots=True)
class Target:
    """Something to scrape, with the labels that a ServiceMonitor would add."""

    port: int
    labels: Mapping[str, str] = field(default_factory=dict)


class PrometheusServer(Program):
    """Scrapes targets on 127.0.0.1 each second and evaluates rules each second."""

    def __init__(self, folder: Path, targets: Sequence[Target], rules: Sequence[Path] = ()) -> None:
        self.port = free_port()
        self._targets = len(targets)
        config = folder / "prometheus.yaml"
        config.write_text(yaml.safe_dump(_config(targets, rules)))
        super().__init__(
            PROMETHEUS,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            log=folder / "prometheus.log",
        )

    def await_targets(self) -> None:
        """Waits until every target has been scraped."""
        until(lambda: len(self.query("up == 1")) == self._targets, "all targets to be scraped")

    def query(self, expression: str) -> list[Any]:
        """The series of an instant query. Raises AssertionError for bad PromQL."""
        found: list[Any] = self.api("query", query=expression)["result"]
        return found

    def api(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of the HTTP API."""
        query = urllib.parse.urlencode(parameters)
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def await_ready(self) -> None:
        until(self._answers, f"prometheus to start, see {self.log}")

    def _answers(self) -> bool:
        assert self.alive, self.log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5):
                return True
        except OSError:  # also 503, while it reads its storage
            return False


def _config(targets: Sequence[Target], rules: Sequence[Path]) -> dict[str, Any]:
    return {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {
                "job_name": "headrace",
                "static_configs": [
                    {"targets": [f"127.0.0.1:{target.port}"], "labels": dict(target.labels)}
                    for target in targets
                ],
            }
        ],
    }
