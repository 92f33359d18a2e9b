"""The output on a terminal, which never blocks the process that reports."""

import io
import subprocess
import sys
import threading

from rich.console import Console

from headrace_cli.processes.report import TerminalReport


def output_of_a_report(*, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    with TerminalReport(console) as report:
        report.status("engine-0", "loading weights")
        report.status("engine-0", "loading weights")
        report.status("engine-0", "ready in 2.0 s", done=True)
        report.alarm("engine-0", "[hot]")
    return out.getvalue()


def test_without_a_terminal_every_change_is_a_plain_line() -> None:
    lines = output_of_a_report(terminal=False).splitlines()

    assert lines == ["engine-0: loading weights", "engine-0: ready in 2.0 s", "engine-0: [hot]"]


def test_on_a_terminal_each_finished_step_becomes_a_line() -> None:
    shown = output_of_a_report(terminal=True)

    assert "✓ engine-0: ready in 2.0 s\n" in shown
    assert "engine-0: [hot]\n" in shown


class StoppedTerminal(io.StringIO):
    """Blocks writes until `resumed` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.resumed = threading.Event()

    def write(self, text: str) -> int:
        self.resumed.wait()
        return super().write(text)


def test_a_stopped_terminal_does_not_block_the_reporter() -> None:
    out = StoppedTerminal()
    with TerminalReport(Console(file=out)) as report:
        for number in range(5000):
            report.event(f"line {number}")
        out.resumed.set()

    assert "line 0\n" in out.getvalue()


REPORTING = """
from headrace_cli.processes.report import TerminalReport
from rich.console import Console
input()
with TerminalReport(Console()) as report:
    for number in range(100):
        report.event(f"line {number}")
"""


def test_a_terminal_that_goes_away_is_not_an_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", REPORTING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate("go\n", timeout=60)

    assert (process.returncode, errors) == (0, "")
