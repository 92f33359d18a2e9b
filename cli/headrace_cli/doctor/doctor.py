"""`headrace doctor`: checks the machine for `up` and names the remedies. Starts nothing."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..tables import Output
from .checks import engine, environment, hardware, model, network
from .checks.finding import Finding, Level

_MARKS = {Level.OK: "[green]ok[/]", Level.WARNING: "[yellow]warning[/]", Level.FAIL: "[red]FAIL[/]"}

Checks = tuple[Callable[[], Iterator[Finding]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """The options, which are the same as those of `up`.

    With `engine` only the needs of one engine are checked, as in its pod; `host`, `port` and
    `data_dir` are then ignored.
    """

    model: str
    host: str
    port: int
    redis_url: str | None
    data_dir: Path
    engine: bool = False


def findings(config: DoctorConfig) -> Iterator[Finding]:
    """Runs every check, one after the other."""
    checks = _engine_checks(config) if config.engine else _machine_checks(config)
    for check in checks:
        yield from check()


def _machine_checks(config: DoctorConfig) -> Checks:
    return (
        environment.python,
        environment.packages,
        hardware.processor,
        hardware.kernels,
        hardware.accelerator,
        lambda: model.check(config.model),
        lambda: hardware.memory(model.weight_bytes(config.model)),
        lambda: network.queue(config.redis_url),
        lambda: network.port(config.host, config.port),
        lambda: environment.data_dir(config.data_dir),
    )


def _engine_checks(config: DoctorConfig) -> Checks:
    environ = os.environ
    return (
        environment.python,
        lambda: environment.packages(environment.ENGINE),
        hardware.processor,
        hardware.kernels,
        lambda: engine.driver(environ),
        lambda: hardware.accelerator(needed=engine.wants_gpu(environ)),
        lambda: engine.launcher(environ),
        lambda: engine.shared_memory(environ),
        lambda: engine.volume(environ),
        lambda: model.check(config.model),
        lambda: hardware.memory(model.weight_bytes(config.model)),
        lambda: network.queue(config.redis_url or "redis://localhost:6379/0"),
        lambda: network.clock(config.redis_url or "redis://localhost:6379/0"),
    )


def run_doctor(config: DoctorConfig, out: Console, *, as_json: bool = False) -> bool:
    """Prints the table, or JSON; False if a check fails."""
    found = list(findings(config))
    healthy = all(finding.level is not Level.FAIL for finding in found)
    if as_json:
        Output(out=out).json({"healthy": healthy, "findings": [each.data for each in found]})
        return healthy
    out.print(_table(found))
    for finding in found:
        if finding.remedy:
            out.print(
                f"- {finding.subject}: {finding.remedy}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    return healthy


def _table(found: list[Finding]) -> Table:
    table = Table("check", "", "found")
    for finding in found:
        table.add_row(finding.subject, _MARKS[finding.level], finding.detail)
    return table
