"""Gateways can have an engine killed, which its supervisor restarts, and nothing else."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace_cli.processes.child import ChildSpec
from headrace_cli.processes.logs import LogFile
from headrace_cli.processes.supervisor import RestartPolicy, Service, Supervisor
from headrace_cli.up.kill_switch import KillSwitch
from headrace_common.config.supervisor_socket import (
    KillAnswer,
    KillRequest,
    decode_answer,
    encode,
)
from headrace_testing.recording_report import RecordingReport
from headrace_testing.waiting import eventually

SLEEPER = (sys.executable, "-I", "-S", "-c", "import signal; signal.pause()")
FAST = RestartPolicy(first_delay=0.01, max_delay=0.05)


@dataclass(slots=True)
class Rig:
    """An engine under a supervisor, and a gateway's end of the switch."""

    engine: Service
    gateway: socket.socket
    report: RecordingReport

    async def ask(self, data: bytes) -> KillAnswer:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.gateway, data)
        async with asyncio.timeout(60):
            return decode_answer(await loop.sock_recv(self.gateway, 2048))

    async def kill(self, engine_id: str) -> KillAnswer:
        return await self.ask(encode(KillRequest(7, engine_id)))

    async def running(self, other_than: int | None = None) -> int:
        async def is_running() -> bool:
            return self.engine.pid not in (None, other_than)

        await eventually(is_running)
        assert self.engine.pid is not None
        return self.engine.pid


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async def ready() -> None:
        return None

    report = RecordingReport()
    spec = ChildSpec(name="engine-0", argv=SLEEPER)
    log = LogFile(tmp_path / "engine-0.log")
    engine = Service(spec, log=log, report=report, policy=FAST, ready=ready)
    supervisor = Supervisor()
    supervisor.start(engine)
    switch = KillSwitch(1, [engine], report)
    serving = asyncio.create_task(switch.serve())
    with socket.socket(fileno=os.dup(switch.fds[0])) as gateway:
        gateway.setblocking(False)
        yield Rig(engine, gateway, report)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    switch.close()
    supervisor.kill()
    await supervisor.stop([engine])


async def test_an_engine_is_killed_and_started_again(rig: Rig) -> None:
    pid = await rig.running()
    answer = await rig.kill(f"{socket.gethostname()}.{pid}.0123456789abcdef")
    assert answer == KillAnswer(7, "engine-0")
    assert await rig.running(other_than=pid) != pid
    assert any("killed by SIGKILL" in event for event in rig.report.events)


@pytest.mark.parametrize(
    "engine_id", ["elsewhere.{pid}.0123", "{host}.{pid}", "{host}.1.0123", "", "engine-0"]
)
async def test_no_other_process_is_killed(rig: Rig, engine_id: str) -> None:
    pid = await rig.running()
    asked = engine_id.format(host=socket.gethostname(), pid=pid)
    assert (await rig.kill(asked)).killed is None
    assert rig.engine.pid == pid


async def test_unreadable_packets_are_ignored(rig: Rig) -> None:
    loop = asyncio.get_running_loop()
    for data in (b"x", b"[]", b'{"number": "7", "engine_id": "e"}', b'{"number": 7}'):
        await loop.sock_sendall(rig.gateway, data)
    assert (await rig.kill("nothing")).killed is None
