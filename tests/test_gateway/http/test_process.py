"""The gateway as a process: its start, its errors, a shared socket, the real queue, its end."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx

from headrace_testing.forked import Forge
from headrace_testing.gateway import MODEL
from headrace_testing.processes import HeadraceProcess, Starter, start_program, until
from headrace_testing.stack import GatewayProcess
from headrace_testing.valkey import ValkeyServer


def start(
    checkpoint: Path, log: Path, *flags: str, starter: Starter | None = None
) -> HeadraceProcess:
    """Starts a gateway, forked by default."""
    arguments = ["--model", str(checkpoint), "--served-model-name", MODEL, "--port", "0"]
    given = [*arguments, "--log-format", "json", *flags]
    return HeadraceProcess("headrace_gateway", given, log, start=starter or Forge().start)


def test_it_serves_and_ends_on_sigterm(
    checkpoint: Path, valkey: ValkeyServer, tmp_path: Path
) -> None:
    flags = ("--redis-url", valkey.url)
    with start(checkpoint, tmp_path / "log", *flags, starter=start_program) as process:
        address = str(process.await_log("gateway ready")["address"])
        ready = httpx.get(f"{address}/health/ready", timeout=30)
        models = httpx.get(f"{address}/v1/models", timeout=30).json()
        process.signal(signal.SIGTERM)

        assert process.wait() == 0

    assert ready.status_code == 503
    assert "no engine serves" in ready.json()["error"]["message"]
    assert [model["id"] for model in models["data"]] == [MODEL]


def test_a_request_without_engines_meets_its_deadline(
    checkpoint: Path, valkey: ValkeyServer, tmp_path: Path
) -> None:
    with start(checkpoint, tmp_path / "log", "--redis-url", valkey.url) as process:
        address = process.await_log("gateway ready")["address"]
        answer = httpx.post(
            f"{address}/v1/completions",
            json={"prompt": "Hi"},
            headers={"x-request-timeout": "0.2"},
            timeout=30,
        )

    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_a_request_is_refused_soon_while_redis_says_nothing(
    checkpoint: Path, valkey: ValkeyServer, tmp_path: Path
) -> None:
    """Redis says nothing if, for example, its node is gone.

    Without the check, each step of a request would wait for seconds.
    """
    with start(checkpoint, tmp_path / "log", "--redis-url", valkey.url) as process:
        address = process.await_log("gateway ready")["address"]
        valkey.pause()
        try:
            refused = httpx.post(f"{address}/v1/completions", json={"prompt": "Hi"}, timeout=10)
            again = httpx.post(f"{address}/v1/completions", json={"prompt": "Hi"}, timeout=10)
        finally:
            valkey.unpause()
        process.await_log("redis answers again")

    for answer in (refused, again):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "backend_unavailable")
        assert int(answer.headers["retry-after"]) > 0


def test_an_idle_gateway_costs_no_cpu(
    checkpoint: Path, valkey: ValkeyServer, tmp_path: Path
) -> None:
    """Counts context switches, not CPU time. uvicorn alone would cause ten a second."""
    with start(checkpoint, tmp_path / "log", "--redis-url", valkey.url) as process:
        process.await_log("gateway ready")
        address = process.await_log("gateway ready")["address"]
        httpx.get(f"{address}/health/live", timeout=30)
        before = context_switches(process)
        subprocess.run(["sleep", "1"], check=True)
        assert context_switches(process) - before < 8


def context_switches(process: HeadraceProcess) -> int:
    total = 0
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        total += sum(int(x.split()[1]) for x in lines if x.startswith("voluntary_ctxt"))
    return total


FEW_FILES = 128


def start_with_few_files(
    module: str, arguments: Sequence[str], log: Path, env: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    limited = ["sh", "-c", f'ulimit -n {FEW_FILES} && exec "$@"', "sh"]
    with log.open("wb") as out:
        return subprocess.Popen(
            [*limited, sys.executable, "-m", module, *arguments], stderr=out, env=dict(env)
        )


def test_idle_sockets_leave_it_the_descriptors_that_it_needs(
    checkpoint: Path, valkey: ValkeyServer, tmp_path: Path
) -> None:
    flags = ("--log-format", "json")
    with GatewayProcess(
        checkpoint, valkey.url, tmp_path / "log", *flags, start=start_with_few_files
    ) as process:
        process.await_log("gateway ready")
        with ExitStack() as idle:
            for _ in range(2 * FEW_FILES):
                idle.enter_context(socket.create_connection(("127.0.0.1", process.port), 60))
            live = httpx.get(f"{process.url}/health/live", timeout=60)
            metrics = httpx.get(f"http://127.0.0.1:{process.metrics_port}/health/live", timeout=60)
            body = {"prompt": "Hi"}
            headers = {"x-request-timeout": "0.1"}
            queued = httpx.post(
                f"{process.url}/v1/completions", json=body, headers=headers, timeout=60
            )

    assert (live.status_code, metrics.status_code, queued.status_code) == (200, 200, 504)


def test_processes_share_a_socket(checkpoint: Path, valkey: ValkeyServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/health/live"
        logs = [tmp_path / "first", tmp_path / "second"]
        processes = [share(listener, checkpoint, valkey, log) for log in logs]
        try:
            until(lambda: all("gateway ready" in log.read_text() for log in logs), "both ready")
            first = httpx.get(url, timeout=60)
            processes[0].send_signal(signal.SIGTERM)
            assert processes[0].wait(60) == 0
            second = httpx.get(url, timeout=60)
        finally:
            for process in processes:
                process.kill()
                process.wait()

    assert first.status_code == second.status_code == 200


def share(
    listener: socket.socket, checkpoint: Path, valkey: ValkeyServer, log: Path
) -> "subprocess.Popen[bytes]":
    environment = {
        "HEADRACE_GATEWAY_MODEL": str(checkpoint),
        "HEADRACE_GATEWAY_REDIS_URL": valkey.url,
        "HEADRACE_GATEWAY_FD": str(listener.fileno()),
    }
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "headrace_gateway"],
            env={**os.environ, **environment},
            pass_fds=[listener.fileno()],
            stderr=out,
        )


def run(log: Path, *flags: str, starter: Starter | None = None, **env: str) -> tuple[int, str]:
    """The exit status of a gateway that ends by itself, forked by default, and what it printed."""
    process = HeadraceProcess("headrace_gateway", flags, log, env, starter or Forge().start)
    with process:
        return process.wait(), log.read_text()


def test_bad_settings_are_named(tmp_path: Path) -> None:
    environment = {"HEADRACE_GATEWAY_MODEL": str(tmp_path), "HEADRACE_GATEWAY_PORT": "http"}
    status, printed = run(tmp_path / "log", starter=start_program, **environment)

    assert status == 78
    assert printed.startswith("headrace gateway: port: ")
    assert "Traceback" not in printed


def test_settings_of_a_model_need_the_model(tmp_path: Path) -> None:
    status, printed = run(tmp_path / "log", "--served-model-name", "x")

    assert status == 78
    assert "served_model_name is of the setting model" in printed


def test_without_a_model_it_waits_for_one(valkey: ValkeyServer, tmp_path: Path) -> None:
    flags = ["--port", "0", "--log-format", "json", "--redis-url", valkey.url]
    log, start = tmp_path / "log", Forge().start
    with HeadraceProcess("headrace_gateway", flags, log, start=start) as process:
        address = str(process.await_log("gateway ready")["address"])
        live = httpx.get(f"{address}/health/live", timeout=30)
        ready = httpx.get(f"{address}/health/ready", timeout=30)
        answer = httpx.post(f"{address}/v1/completions", json={"prompt": "x"}, timeout=30)

    assert live.status_code == 200
    assert "no model is registered yet" in ready.json()["error"]["message"]
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_model")


def test_it_waits_for_a_redis_that_starts_later(checkpoint: Path, tmp_path: Path) -> None:
    """Until then the gateway is live but not ready."""
    server = ValkeyServer(tmp_path / "valkey")
    flags = ("--redis-url", server.url, "--metrics-port", "0")
    with start(checkpoint, tmp_path / "log", *flags) as process:
        process.await_log("waiting for redis")
        url = f"{process.await_log('metrics endpoint open')['url']}/health"
        early = [httpx.get(f"{url}/{check}", timeout=60) for check in ("live", "ready")]
        server.start()
        process.await_log("gateway ready")
        late = httpx.get(f"{url}/ready", timeout=60)
    server.kill()

    assert [answer.status_code for answer in early] == [200, 503]
    assert (early[1].text, late.status_code) == ("starting\n", 200)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    status, printed = run(tmp_path / "log", "--model", str(tmp_path))

    assert status == 78
    assert "tokenizer.json is missing" in printed


def test_a_port_in_use_is_named(checkpoint: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = ("--model", str(checkpoint), "--port", str(taken.getsockname()[1]))
        status, printed = run(tmp_path / "log", *flags)

    assert status == 78
    assert "HEADRACE_GATEWAY_PORT" in printed


def test_an_absent_redis_is_named(checkpoint: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    flags = ["--redis-url", f"redis://127.0.0.1:{port}/0", "--startup-timeout", "0"]
    status, printed = run(tmp_path / "log", "--model", str(checkpoint), "--port", "0", *flags)

    assert status == 69
    assert "backend_unavailable" in printed
