"""`headrace doctor`: looks at the machine as `up` would and says what to do. Starts nothing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .checks import environment, hardware, model, network
from .checks.finding import Finding, Level

_MARKS = {Level.OK: "[green]ok[/]", Level.WARNING: "[yellow]warning[/]", Level.FAIL: "[red]FAIL[/]"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """The same choices as for `up`."""

    model: str
    host: str
    port: int
    redis_url: str | None
    data_dir: Path


def findings(config: DoctorConfig) -> Iterator[Finding]:
    """Runs every check, one after the other."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
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
    for check in checks:
        yield from check()


def run_doctor(config: DoctorConfig, out: Console) -> bool:
    """Prints the table; False where something fails."""
    found = list(findings(config))
    out.print(_table(found))
    for finding in found:
        if finding.remedy:
            out.print(
                f"- {finding.subject}: {finding.remedy}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    return all(finding.level is not Level.FAIL for finding in found)


def _table(found: list[Finding]) -> Table:
    table = Table("check", "", "found")
    for finding in found:
        table.add_row(finding.subject, _MARKS[finding.level], finding.detail)
    return table
