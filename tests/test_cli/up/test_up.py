"""`headrace up` as a separate process, with a real Valkey and stand-ins for engine and gateway."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_cli.running import find_running
from headrace_testing.pids import alive
from headrace_testing.processes import until
from headrace_testing.stand_ins import write_stand_ins

PIDS = re.compile(r'"pid": (\d+)')


class UpProcess:
    """A running `up` and what it has printed so far."""

    def __init__(self, folder: Path, port: int, *args: str, **env: str) -> None:
        self.data = folder / "data"
        self.port = port
        command = [sys.executable, "-m", "headrace_cli", "up", "--model", str(model(folder))]
        command += ["--port", str(port), "--data-dir", str(self.data), *args]
        path = str(folder / "stand-ins")
        if not Path(path).exists():
            write_stand_ins(Path(path))
        clean = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
        self.popen = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**clean, "PYTHONPATH": path, **env},
            start_new_session=True,
        )
        self.printed = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.printed += line

    def wait(self) -> int:
        code = self.popen.wait(60)
        self.close()
        return code

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        self._reader.join()
        assert self.popen.stdout is not None
        self.popen.stdout.close()

    def until_ready(self) -> None:
        until(lambda: "Ctrl-C drains" in self.printed or self.popen.poll() is not None, "up")
        assert "Ctrl-C drains" in self.printed, self.printed

    def log(self, name: str) -> str:
        path = self.data / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def child_pids(self) -> list[int]:
        found = [pid for path in (self.data / "logs").glob("*.log") for pid in pids(path)]
        return [pid for pid in found if alive(pid)]

    def asked(self) -> int:
        """The pid of the gateway that answers a request."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health/ready") as answer:
            return int(answer.read())


def pids(log: Path) -> list[int]:
    text = log.read_text()
    return [int(pid) for pid in PIDS.findall(text) + re.findall(r"pid=(\d+), just", text)]


def model(folder: Path) -> Path:
    path = folder / "tiny"
    path.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_text("{}")
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return path


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        number: int = sock.getsockname()[1]
        return number


@pytest.fixture
def started(tmp_path: Path, port: int) -> Iterator[UpProcess]:
    process = UpProcess(tmp_path, port, "--engines", "2", "--gateways", "2")
    try:
        process.until_ready()
        yield process
    finally:
        process.close()


def test_it_says_where_it_serves_and_drains_on_ctrl_c(started: UpProcess) -> None:
    assert f"http://127.0.0.1:{started.port}/v1" in started.printed
    assert "curl " in started.printed
    assert '"model": "tiny"' in started.printed
    assert f"headrace chat --url http://127.0.0.1:{started.port}/v1" in started.printed
    assert f"Open http://127.0.0.1:{started.port} in a browser" in started.printed
    children = started.child_pids()
    assert len(children) == 5
    running = find_running(started.data)
    assert running is not None
    assert (running.pid, running.model) == (started.popen.pid, "tiny")
    assert [one.name for one in running.engines] == ["engine-0", "engine-1"]
    assert all(f"{one.metrics}/metrics" in started.printed for one in running.gateways)

    started.popen.send_signal(signal.SIGINT)

    assert started.wait() == 0, started.printed
    for name in ("engine-0", "engine-1", "gateway-0", "gateway-1"):
        assert "drained" in started.log(name)
    order = re.findall(r"stopping (\w+)", started.printed)
    assert order == ["gateway", "engine", "valkey"]
    assert not any(alive(pid) for pid in children)
    assert not (started.data / "running.json").exists()


def test_a_gateway_that_is_killed_comes_back_on_the_same_port(started: UpProcess) -> None:
    victim = started.asked()

    os.kill(victim, signal.SIGKILL)
    until(lambda: started.printed.count("restarting in") == 1, "news of the death")
    until(lambda: started.printed.count("ready in") == 6, "the gateway to be back")

    assert victim not in {started.asked() for _ in range(5)}


def test_no_child_survives_a_kill_of_up_itself(started: UpProcess) -> None:
    children = started.child_pids()
    assert len(children) == 5

    started.popen.kill()

    until(lambda: not any(alive(pid) for pid in children), "the children to be gone")


def test_a_port_in_use_is_reported_and_nothing_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = UpProcess(tmp_path, taken.getsockname()[1])
        assert process.wait() == 2

    assert "cannot listen on 127.0.0.1" in process.printed
    assert "--port" in process.printed
    assert not (process.data / "logs").exists()


def test_an_engine_that_cannot_start_ends_up_with_its_reason(tmp_path: Path, port: int) -> None:
    process = UpProcess(tmp_path, port, STAND_IN_FAIL="engine")

    assert process.wait() == 1
    assert "engine-0 cannot start (exit code 2)" in process.printed
    assert process.printed.count("weights missing file=model.safetensors") == 1
    assert process.child_pids() == []


def test_a_second_ctrl_c_kills(tmp_path: Path, port: int) -> None:
    process = UpProcess(tmp_path, port, STAND_IN_STUCK="engine")
    process.until_ready()
    children = process.child_pids()
    process.popen.send_signal(signal.SIGINT)
    until(lambda: '"stuck"' in process.log("engine-0"), "the engine to be stuck")

    process.popen.send_signal(signal.SIGINT)

    assert process.wait() == 130, process.printed
    assert "once more to kill" in process.printed
    assert len(children) == 3
    assert not any(alive(pid) for pid in children)


def test_flags_go_to_the_process_that_has_them(tmp_path: Path, port: int) -> None:
    process = UpProcess(
        tmp_path, port, "--dtype=auto", "--no-strict-requests", "--", "--max-num-seqs", "7"
    )
    process.until_ready()
    process.popen.send_signal(signal.SIGTERM)

    assert process.wait() == 0
    assert '"args": ["--dtype=auto", "--max-num-seqs=7"]' in process.log("engine-0")
    assert '"args": ["--no-strict-requests"]' in process.log("gateway-0")


def test_a_wrong_flag_is_named_and_nothing_is_started(tmp_path: Path, port: int) -> None:
    process = UpProcess(tmp_path, port, "--chat-template", "absent.jinja")

    assert process.wait() == 2
    assert "--chat-template: absent.jinja is not a file here" in process.printed
    assert not process.data.exists()


def test_a_data_folder_serves_one_up_at_a_time(started: UpProcess, tmp_path: Path) -> None:
    second = UpProcess(tmp_path, started.port)

    assert second.wait() == 2
    assert "another `headrace up` uses" in second.printed


def test_an_unreachable_redis_is_reported(tmp_path: Path, port: int) -> None:
    url = "redis://:secret@127.0.0.1:1/0"
    process = UpProcess(tmp_path, port, "--redis", url)

    assert process.wait() == 2
    assert "cannot use Redis at redis://:***@127.0.0.1:1/0" in process.printed
    assert "secret" not in process.printed
