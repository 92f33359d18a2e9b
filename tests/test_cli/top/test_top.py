"""`headrace top` against a scripted gateway, and what it draws; as a process where it has a
terminal or a signal."""

import json
import os
import signal
import subprocess
import sys
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from headrace_cli.top.snapshot import Snapshot
from headrace_cli.top.view import draw
from headrace_testing.in_process import headrace
from headrace_testing.live_server import LiveServer, engine, heartbeat, model, snapshot
from headrace_testing.terminals import TerminalProcess


def command(url: str, *args: str) -> list[str]:
    return [sys.executable, "-m", "headrace_cli", "top", "--url", url, *args]


def environment() -> dict[str, str]:
    ours = ("OPENAI_BASE_URL", "OPENAI_API_KEY")
    return {name: value for name, value in os.environ.items() if name not in ours}


def top(url: str, *args: str) -> subprocess.CompletedProcess[str]:
    return headrace("top", "--url", url, *args, env=environment())


def drawn(*engines: dict[str, Any], width: int = 80, **changes: Any) -> list[str]:
    out = StringIO()
    Console(width=width, file=out).print(
        draw(Snapshot.model_validate(snapshot(*engines, **changes)))
    )
    return out.getvalue().splitlines()


def words(lines: list[str], first: str) -> list[str]:
    """The cells of the row that begins with this word."""
    (found,) = [line for line in lines if line.startswith(f"{first} ")]
    return found.split()


def test_a_row_says_what_an_engine_does() -> None:
    row = words(drawn(engine()), "engine-0")

    assert row == [
        "engine-0",
        "ready",
        "12.0",
        "ms",
        "812",
        "77",
        "1",
        "2",
        "1",
        "5",
        "██▒▒▒▒▒···",
        "25%",
    ]


def test_a_row_says_what_waits_and_why_replicas_change() -> None:
    scaling = {"desired": 2, "ready": 1, "reason": "Backlog", "message": "1,024 tokens wait"}
    row = words(drawn(models=[model(scaling=scaling)]), "headrace-demo")

    assert row == ["headrace-demo", "3", "1024", "900", "0.4", "s", "16", "1/2", "Backlog"]


def test_an_engine_that_starts_shows_its_phase() -> None:
    start = {"id": "host.1.abc", "name": "engine-1", "phase": "weights", "seconds": 12.34}
    row = words(drawn(engine(), models=[model(starts=[start])]), "engine-1")

    assert row == ["engine-1", "starts:", "weights,", "12.3", "s"]


def test_an_engine_without_details_shows_its_heartbeat() -> None:
    row = words(drawn(heartbeat(state="silent", age=12.34)), "engine-0")

    assert row == ["engine-0", "silent", "12.3", "s", "-", "-", "-", "-", "3", "-", "-", "-", "-"]


def test_everything_fits_on_eighty_columns() -> None:
    lines = drawn(engine(), engine(name="engine-1", state="draining"))

    assert all(len(line) <= 80 and "…" not in line for line in lines)


def test_engines_of_several_models_name_them() -> None:
    models = [model(), model(name="other")]
    lines = drawn(engine(model="other"), models=models, width=120)

    assert words(lines, "engine-0")[1] == "other"


def test_the_caller_s_sequences_are_separated_from_those_of_others() -> None:
    states = [
        ("team-a", "decode", 40),
        (None, "prefill", 8),
        ("team-a", "waiting", 0),
        (None, "swapped", 2),
    ]
    sequences = [
        {"state": state, "tenant": tenant, "computed": computed}
        for tenant, state, computed in states
    ]
    lines = drawn(engine(sequences=sequences))

    assert words(lines, "team-a") == ["team-a", "0", "1", "1", "0", "40"]
    assert words(lines, "others") == ["others", "1", "0", "0", "1", "10"]
    assert not any(line.startswith("tenant ") for line in drawn(engine()))


def test_a_name_cannot_write_to_the_terminal() -> None:
    lines = drawn(engine(name="[red]\x1b[2Jx"))

    assert any(line.startswith("[red][2Jx ") for line in lines)


def test_missing_and_old_data_are_mentioned() -> None:
    text = "\n".join(drawn(engine(), stale=True, engines_left_out=7))

    assert "and 7 more engines" in text
    assert "cannot reach Redis" in text


def test_once_waits_until_engines_report_their_batch() -> None:
    with LiveServer([snapshot(heartbeat()), snapshot(engine())]) as server:
        done = top(f"{server.address}/v1", "--once")

    assert (done.returncode, done.stderr) == (0, "")
    assert "812" in done.stdout


def test_once_stops_waiting_for_details_that_do_not_come() -> None:
    with LiveServer([snapshot(heartbeat())] * 2) as server:
        done = top(server.address, "--once")

    assert done.returncode == 0
    assert "engine-0" in done.stdout


def test_json_is_a_line_for_each_snapshot() -> None:
    views = [snapshot(engine()), snapshot(heartbeat())]
    with LiveServer(views) as server:
        process = subprocess.Popen(
            command(server.address, "--json"), stdout=subprocess.PIPE, text=True, env=environment()
        )
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)

    assert [json.loads(line) for line in lines] == views
    assert process.returncode == 0


def test_json_once_is_one_document() -> None:
    with LiveServer([snapshot(engine())]) as server:
        done = top(server.address, "--once", "--json")

    assert json.loads(done.stdout) == snapshot(engine())


def test_a_key_is_asked_for_and_sent() -> None:
    with LiveServer([snapshot()], key="sk-1") as server:
        refused = top(server.address, "--once")
        done = top(server.address, "--once", "--api-key", "sk-1")

    assert refused.returncode == 1
    assert "give it with --api-key or OPENAI_API_KEY" in refused.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (404, "its setting `console` is off"),
        (429, "has as many watchers as it takes"),
        (503, "HTTP 503"),
    ],
)
def test_a_refused_request_is_one_message(status: int, message: str) -> None:
    with LiveServer(status) as server:
        done = top(server.address)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert message in done.stderr


def test_a_url_without_a_scheme_is_refused() -> None:
    done = top("localhost:8000", "--once")

    assert done.returncode == 1
    assert "--url must be http(s)://host[:port], not 'localhost:8000'" in done.stderr


def test_an_unreachable_gateway_is_one_message() -> None:
    done = top("http://127.0.0.1:1", "--once")

    assert done.returncode == 1
    assert "cannot reach http://127.0.0.1:1" in done.stderr
    assert done.stderr.count("\n") == 1


def test_data_other_than_snapshots_is_refused() -> None:
    with LiveServer([{"time": "soon"}]) as server:
        done = top(server.address, "--once")

    assert "speaks another version of the live data (time" in done.stderr


def test_on_a_terminal_it_continues_after_an_interruption() -> None:
    with (
        LiveServer([snapshot(engine())], [snapshot(engine(name="engine-9"))]) as server,
        TerminalProcess(command(server.address), columns=100, env=environment()) as terminal,
    ):
        terminal.until("engine-0")
        terminal.until("trying again")
        terminal.until("engine-9")
        terminal.interrupt()
        assert terminal.wait() == 0


def test_no_color_is_respected() -> None:
    with (
        LiveServer([snapshot(engine(state="silent"))]) as server,
        TerminalProcess(
            command(server.address), columns=100, env={**environment(), "NO_COLOR": "1"}
        ) as terminal,
    ):
        terminal.until("engine-0")
        terminal.interrupt()
        terminal.wait()
        assert "\x1b[31m" not in terminal.raw
