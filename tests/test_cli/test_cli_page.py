"""docs/cli.md has every current command; each has an example; shells complete them."""

import os
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from headrace_cli.main import app
from headrace_testing.pages.cli import PAGE, commands, example, page

COMMANDS = dict(commands())


def test_the_page_matches_the_commands() -> None:
    assert PAGE.read_text() == page(), "`make generated` writes it anew"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_an_example_that_it_accepts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = COMMANDS[name]
    words = shlex.split(example(command))
    own = name.split()
    assert words[: len(own)] == own
    command.make_context(name, words[len(own) :])


def test_every_option_says_what_it_does() -> None:
    unexplained = [
        f"{name} {parameter.name}"
        for name, command in COMMANDS.items()
        for parameter in command.params
        if not parameter.help
    ]
    assert unexplained == []


def test_all_paragraphs_of_the_help_fill_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["up", "--help"]).output
    assert " vLLM, and passes each to the processes that have it. " in shown


def test_the_shell_completes_commands_and_options() -> None:
    def completed(words: str) -> set[str]:
        env = {
            **os.environ,
            "_HEADRACE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
        headrace = os.path.join(os.path.dirname(sys.executable), "headrace")
        done = subprocess.run([headrace], capture_output=True, text=True, timeout=60, env=env)
        return set(done.stdout.split())

    assert completed("headrace de") == {"debug", "demo"}
    assert completed("headrace bench --pr") == {"--prompt-tokens", "--prefixes", "--prefix-tokens"}
    assert completed("headrace models pu") == {"pull"}
