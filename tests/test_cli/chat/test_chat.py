"""`headrace chat` against a scripted server; as a process where it has a terminal or a signal."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace_testing.in_process import headrace
from headrace_testing.openai_server import Answer, OpenAIServer
from headrace_testing.processes import until
from headrace_testing.terminals import TerminalProcess

HELLO = Answer(pieces=("Good ", "day", "."))


def command(url: str, *args: str) -> list[str]:
    return [sys.executable, "-m", "headrace_cli", "chat", "--url", url, *args]


def environment(**extra: str) -> dict[str, str]:
    ours = ("OPENAI_BASE_URL", "OPENAI_API_KEY")
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    return {**clean, "NO_PROXY": "127.0.0.1", **extra}


def chat(
    server: OpenAIServer, *args: str, typed: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    given = ("chat", "--url", server.url, *args)
    return headrace(*given, typed=typed, env=environment(**env))


def contents(server: OpenAIServer, index: int) -> list[tuple[str, str]]:
    messages = server.requests[index].body["messages"]
    return [(message["role"], message["content"]) for message in messages]


def test_once_prints_the_answer_alone() -> None:
    with OpenAIServer(HELLO) as server:
        done = chat(server, "--once", "Hi", "--max-tokens", "9", "--temperature", "0")

    assert (done.returncode, done.stdout, done.stderr) == (0, "Good day.\n", "")
    body = server.requests[0].body
    assert body["model"] == "scripted"
    assert body["stream"] is True
    assert (body["max_tokens"], body["temperature"]) == (9, 0)


def test_unset_options_are_not_sent() -> None:
    with OpenAIServer(HELLO) as server:
        chat(server, "--once", "Hi", "--model", "other")

    assert server.requests[0].body.keys() == {"model", "messages", "stream"}
    assert server.requests[0].body["model"] == "other"
    assert server.requests[0].authorization is None


def test_the_key_of_the_environment_is_sent() -> None:
    with OpenAIServer(HELLO) as server:
        chat(server, "--once", "Hi", OPENAI_API_KEY="sk-test")

    assert server.requests[0].authorization == "Bearer sk-test"


def test_a_conversation_remembers_until_it_is_reset() -> None:
    typed = "one\ntwo\n/reset\nthree\n/exit\nnever\n"
    with OpenAIServer(HELLO, HELLO, HELLO) as server:
        done = chat(server, "--system", "Be kind", typed=typed)

    assert done.returncode == 0
    assert contents(server, 1) == [
        ("system", "Be kind"),
        ("user", "one"),
        ("assistant", "Good day."),
        ("user", "two"),
    ]
    assert contents(server, 2) == [("system", "Be kind"), ("user", "three")]
    assert len(server.requests) == 3


def test_a_failed_turn_is_reported_and_forgotten() -> None:
    failed = Answer(status=503, error="the queue is full")
    with OpenAIServer(failed, HELLO) as server:
        done = chat(server, typed="one\ntwo\n")

    assert "HTTP 503: the queue is full" in done.stdout
    assert contents(server, 1) == [("user", "two")]


def test_an_error_in_the_stream_is_shown_and_the_text_before_it_is_kept() -> None:
    broken = Answer(pieces=("Once",), error_event="state lost")
    with OpenAIServer(broken, HELLO) as server:
        done = chat(server, typed="one\ntwo\n")

    assert "state lost" in done.stdout
    assert ("assistant", "Once") in contents(server, 1)


def test_once_fails_if_the_server_fails() -> None:
    with OpenAIServer(Answer(status=400, error="too long")) as server:
        done = chat(server, "--once", "Hi")

    assert done.returncode == 1
    assert done.stderr == "error: HTTP 400: too long\n"


def test_a_missing_key_is_explained() -> None:
    with OpenAIServer(Answer(status=401, error="no key")) as server:
        done = chat(server, "--once", "Hi")

    assert "HTTP 401: no key. Give a key with --api-key or OPENAI_API_KEY" in done.stderr
    assert "headrace keys create" in done.stderr


def test_a_url_without_its_last_part_is_reported() -> None:
    with OpenAIServer() as server:
        url = server.url.removesuffix("/v1")
        done = headrace("chat", "--url", url, "--once", "Hi", env=environment())

    assert done.stderr == f"error: {url} is not an OpenAI API: the URL ends with /v1\n"


def test_an_unreachable_server_is_reported() -> None:
    url = "http://127.0.0.1:1/v1"
    done = headrace("chat", "--url", url, "--once", "Hi", env=environment())

    assert done.returncode == 1
    assert "cannot reach http://127.0.0.1:1/v1" in done.stderr
    assert "headrace up" in done.stderr


def test_a_model_cannot_write_control_sequences_to_the_terminal() -> None:
    nasty = Answer(pieces=("a\x1b[2J\x9b1mb\n", "\tc\r\x07[bold]x[/bold]"), reasoning=("hm ",))
    with OpenAIServer(nasty) as server:
        done = chat(server, "--once", "Hi")

    assert done.stdout == "hm a[2J1mb\n\tc[bold]x[/bold]\n"


def on_a_terminal(
    server: OpenAIServer, folder: Path, *args: str, columns: int = 80
) -> TerminalProcess:
    env = environment(XDG_STATE_HOME=str(folder))
    return TerminalProcess(command(server.url, *args), columns=columns, env=env)


def test_words_are_not_broken_at_the_edge(tmp_path: Path) -> None:
    pieces = ("The quick br", "own fox", " jumps over the la", "zy dog,", " again\nand", " again.")
    with (
        OpenAIServer(Answer(pieces=pieces)) as server,
        on_a_terminal(server, tmp_path, "--once", "Hi", columns=20) as terminal,
    ):
        assert terminal.wait() == 0
    assert terminal.text == "The quick brown fox \njumps over the lazy \ndog, again\nand again.\n"


def test_several_lines_are_one_message(tmp_path: Path) -> None:
    with (
        OpenAIServer(HELLO, HELLO) as server,
        on_a_terminal(server, tmp_path) as terminal,
    ):
        terminal.until("> ")
        terminal.enter('one \\\ntwo\n"""three\n  four\n"""\n')
        until(lambda: len(server.requests) == 2, "both messages")
        terminal.enter("/exit\n")
        assert terminal.wait() == 0
    assert contents(server, 1) == [
        ("user", "one \ntwo"),
        ("assistant", "Good day."),
        ("user", "three\n  four"),
    ]


def test_the_arrow_keys_bring_back_what_was_typed_in_an_earlier_chat(tmp_path: Path) -> None:
    history = tmp_path / "headrace" / "chat_history"
    with OpenAIServer(HELLO, HELLO) as server:
        for keys in ("Hello there\n", "\x1b[A\x1b[A\n"):  # /exit was sent in between
            with on_a_terminal(server, tmp_path) as terminal:
                terminal.until("> ")
                terminal.enter(keys)
                terminal.until("Good day.")
                terminal.enter("/exit\n")
                assert terminal.wait() == 0
    assert contents(server, 1) == [("user", "Hello there")]
    assert history.stat().st_mode & 0o077 == 0


def test_without_history_nothing_is_kept(tmp_path: Path) -> None:
    with (
        OpenAIServer(HELLO) as server,
        on_a_terminal(server, tmp_path, "--no-history") as terminal,
    ):
        terminal.until("> ")
        terminal.enter("Hello there\n")
        terminal.until("Good day.")
        terminal.enter("/exit\n")
        assert terminal.wait() == 0
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def talking() -> Callable[[OpenAIServer], subprocess.Popen[str]]:
    def start(server: OpenAIServer) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command(server.url),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    return start


def test_ctrl_c_stops_an_answer_and_not_the_chat(
    talking: Callable[[OpenAIServer], subprocess.Popen[str]],
) -> None:
    endless = Answer(pieces=("Once upon",), stalls=True)
    with OpenAIServer(endless, HELLO) as server, talking(server) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("a story\n")
        process.stdin.flush()
        help_line = process.stdout.readline()
        assert process.stdout.read(9) == "Once upon"

        process.send_signal(signal.SIGINT)
        until(server.requests[0].hung_up.is_set, "the server to see the client hang up")
        rest, _ = process.communicate("go on\n/exit\n", timeout=60)

    assert "/reset" in help_line
    assert "Good day." in rest
    assert process.returncode == 0
    assert contents(server, 1) == [
        ("user", "a story"),
        ("assistant", "Once upon"),
        ("user", "go on"),
    ]
