"""Restarts, giving up, and draining, with real processes."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace_cli.errors import StartFailed
from headrace_cli.processes.child import ChildSpec
from headrace_cli.processes.logs import LogFile
from headrace_cli.processes.supervisor import RestartPolicy, Service, Supervisor
from headrace_testing.pids import alive
from headrace_testing.recording_report import RecordingReport

FAST = RestartPolicy(first_delay=0.01, max_delay=0.05)
# Reports that it is ready, waits for SIGTERM, and logs a last line.
OBEDIENT = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("up", flush=True)
signal.sigwait({signal.SIGTERM})
print("bye", flush=True)
"""
STUBBORN = OBEDIENT.replace('print("bye"', 'signal.sigwait({signal.SIGUSR1}); print("bye"')


async def eventually(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds; the test's time limit ends a vain wait."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.01)


def spec(program: str, *, drain_seconds: float = 30.0, quiet: bool = False) -> ChildSpec:
    argv = (sys.executable, "-I", "-S", "-c", program)
    return ChildSpec(name="child", argv=argv, drain_seconds=drain_seconds, quiet=quiet)


class Bench:
    """A supervisor with one service, which is ready after its first log line."""

    def __init__(self, folder: Path, child: ChildSpec, policy: RestartPolicy) -> None:
        self.report = RecordingReport()
        self.log = folder / "child.log"
        self.supervisor = Supervisor()
        self.service = Service(
            child,
            log=LogFile(self.log),
            report=self.report,
            policy=policy,
            ready=lambda: self.until_lines(self.service.starts),
        )

    async def until_lines(self, count: int) -> None:
        await eventually(lambda: self.log.read_text().count('"up"') >= count)

    async def until_pid_other_than(self, pid: int | None) -> int:
        await eventually(lambda: self.service.pid not in (None, pid))
        now = self.service.pid
        assert now is not None
        return now


@asynccontextmanager
async def bench(
    folder: Path, child: ChildSpec, policy: RestartPolicy = FAST
) -> AsyncIterator[Bench]:
    made = Bench(folder, child, policy)
    made.supervisor.start(made.service)
    try:
        yield made
    finally:
        made.supervisor.kill()
        await made.supervisor.stop([made.service])


async def test_a_child_that_dies_is_started_again_and_the_reason_is_reported(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, spec(OBEDIENT)) as made:
        await made.service.ready.wait()
        first = await made.until_pid_other_than(None)

        os.kill(first, signal.SIGKILL)
        second = await made.until_pid_other_than(first)

        assert second != first
        events = "\n".join(made.report.events)
        assert "child died (killed by SIGKILL" in events
        assert "restarting in 0.01 s" in events


async def test_the_last_output_of_a_dying_child_is_reported(tmp_path: Path) -> None:
    dying = OBEDIENT + "print('disk on fire', flush=True); raise SystemExit(7)"
    async with bench(tmp_path, spec(dying)) as made:
        await made.service.ready.wait()
        os.kill(await made.until_pid_other_than(None), signal.SIGTERM)
        await eventually(lambda: bool(made.report.events))

        assert "exit code 7" in made.report.events[0]
        assert "disk on fire" in made.report.events[0]


async def test_a_child_that_refuses_its_settings_is_given_up_at_once(tmp_path: Path) -> None:
    program = "import sys; print('no such model: /nowhere', file=sys.stderr); sys.exit(2)"
    async with bench(tmp_path, spec(program)) as made:
        with pytest.raises(StartFailed, match=r"(?s)cannot start \(exit code 2\).*no such model"):
            await made.supervisor.failed

        assert made.service.starts == 1


async def test_a_reason_that_was_shown_is_not_repeated(tmp_path: Path) -> None:
    line = '{"level": "ERROR", "message": "no such model"}'
    program = f"import sys; print({line!r}, file=sys.stderr); sys.exit(2)"
    async with bench(tmp_path, spec(program)) as made:
        with pytest.raises(StartFailed) as failed:
            await made.supervisor.failed

        assert made.report.alarms == [("child", "no such model")]
        assert "no such model" not in str(failed.value)
        assert "as it says above" in str(failed.value)


async def test_a_child_that_never_gets_ready_is_given_up_after_some_starts(tmp_path: Path) -> None:
    async with bench(tmp_path, spec("raise SystemExit(1)")) as made:
        with pytest.raises(StartFailed, match="exit code 1"):
            await made.supervisor.failed

        assert made.service.starts == FAST.max_starts


async def test_a_program_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    child = ChildSpec(name="child", argv=("/nowhere/program",))
    async with bench(tmp_path, child) as made:
        with pytest.raises(StartFailed, match="/nowhere/program"):
            await made.supervisor.failed

        assert made.service.starts == 1


async def test_stopping_lets_a_child_drain(tmp_path: Path) -> None:
    async with bench(tmp_path, spec(OBEDIENT)) as made:
        await made.service.ready.wait()

        await made.supervisor.stop([made.service])

        assert '"bye"' in made.log.read_text()
        assert made.service.pid is None
        assert made.report.events == []


async def test_a_child_that_does_not_drain_in_time_is_killed(tmp_path: Path) -> None:
    async with bench(tmp_path, spec(STUBBORN, drain_seconds=0.1)) as made:
        await made.service.ready.wait()

        await made.supervisor.stop([made.service])

        assert made.service.pid is None
        assert made.report.events == ["child did not drain in 0.1 s: killing it"]


async def test_stopping_ends_the_wait_for_a_restart(tmp_path: Path) -> None:
    never = RestartPolicy(first_delay=10_000, max_delay=10_000)
    async with bench(tmp_path, spec("raise SystemExit(1)"), never) as made:
        await eventually(lambda: bool(made.report.events))

        await asyncio.wait_for(made.supervisor.stop([made.service]), 60)

        assert made.service.starts == 1


async def test_grandchildren_end_with_their_parent(tmp_path: Path) -> None:
    program = "import os, signal; os.fork(); print('pid', os.getpid(), flush=True); signal.pause()"
    async with bench(tmp_path, spec(program)) as made:
        pid = await made.until_pid_other_than(None)
        await eventually(lambda: made.log.read_text().count("pid ") == 2)
        family = [int(found) for found in re.findall(r"pid (\d+)", made.log.read_text())]
        assert pid in family
        os.kill(pid, signal.SIGKILL)

        await asyncio.wait_for(made.supervisor.stop([made.service]), 60)

        await eventually(lambda: not any(alive(one) for one in family))


async def test_alarms_of_a_child_are_shown_and_a_quiet_one_only_while_it_serves(
    tmp_path: Path,
) -> None:
    alarm = """print('{"level": "WARNING", "message": "hot", "degrees": 91}', flush=True)\n"""
    async with bench(tmp_path, spec(alarm + OBEDIENT)) as made:
        await made.service.ready.wait()
        assert made.report.alarms == [("child", "hot degrees=91")]

    quiet_folder = tmp_path / "quiet"
    async with bench(quiet_folder, spec(alarm + OBEDIENT, quiet=True)) as made:
        await made.service.ready.wait()
        assert made.report.alarms == []


@pytest.mark.parametrize(("failures", "seconds"), [(1, 0.5), (2, 1.0), (3, 2.0), (50, 30.0)])
def test_the_delay_before_a_restart_doubles_up_to_its_bound(failures: int, seconds: float) -> None:
    assert RestartPolicy().delay(failures) == seconds
