"""Flags of `headrace up`: they are parsed, passed to the processes that have them, and checked
before a start."""

import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from headrace_cli.commands.up_command import UpCommand, passed_on
from headrace_cli.errors import UsageError
from headrace_cli.flags.assignment import ProcessArguments, assigned, known_flags
from headrace_cli.flags.command_line import read_words
from headrace_cli.flags.flag import Arity, Flag
from headrace_cli.main import app
from headrace_cli.up.stack import UpConfig

KNOWN = {"eager": Arity.SWITCH, "dtype": Arity.ONE, "names": Arity.MANY}


def arguments(*words: str) -> ProcessArguments:
    """The arguments that `headrace up` passes to its processes."""
    flags = read_words(words, known_flags()).flags
    return assigned(flags, UpConfig().flags)


def of_up(*words: str) -> tuple[dict[str, object], list[str]]:
    """The options of `up` itself, and the names of the flags that it passes on."""
    command = typer.main.get_command(app).commands["up"]  # type: ignore[attr-defined]
    assert isinstance(command, UpCommand)
    context = command.make_context("up", list(words))
    return context.params, [flag.name for flag in passed_on(context)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("--dtype auto --eager", [("dtype", "auto"), ("eager", "true")]),
        ("--dtype=auto --no-eager", [("dtype", "auto"), ("eager", "false")]),
        ("--eager=false --no-eager=false", [("eager", "false"), ("eager", "true")]),
        ("--names a b --dtype -1", [("names", "a"), ("names", "b"), ("dtype", "-1")]),
        ("-- --dtype auto", [("dtype", "auto")]),
    ],
)
def test_words_are_read_as_flags(words: str, flags: list[tuple[str, str]]) -> None:
    found = read_words(words.split(), KNOWN)
    assert [(flag.name, flag.value) for flag in found.flags] == flags
    assert found.words == ()


def test_words_that_belong_to_no_flag_are_kept() -> None:
    assert read_words(["tiny", "--eager", "other"], KNOWN).words == ("tiny", "other")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--dtyp auto", "no flag --dtyp: did you mean --dtype?"),
        ("--utterly-else", "no flag --utterly-else$"),
        ("--no-dtype", "no flag --no-dtype"),
        ("--dtype", "--dtype needs a value"),
        ("--dtype --eager", "--dtype needs a value"),
        ("--eager=7", "--eager 7: not true or false"),
    ],
)
def test_unknown_flags_are_named(words: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read_words(words.split(), KNOWN)


def test_a_flag_goes_to_the_process_that_has_it(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    found = arguments(
        *("--tool-call-parser", "hermes", "--no-strict-requests", "--max-num-seqs", "7"),
        *("--no-enable-prefix-caching", "--max-model-len", "128", "--chat-template", str(template)),
    )
    both = ("--max-model-len=128", f"--chat-template={template}")
    assert found.engine == ("--max-num-seqs=7", "--no-enable-prefix-caching", *both)
    assert found.gateway == ("--tool-call-parser=hermes", "--no-strict-requests", *both)


def test_gateways_get_the_names_of_the_engines_adapters() -> None:
    found = arguments("--enable-lora", "--lora-modules", "sql=/a/sql", "org/b=/b")
    assert found.adapters == ("sql", "org/b")
    assert found.gateway == ()
    assert arguments("--lora-modules", '{"a": "/x"}').adapters == ("a",)


def test_variables_are_used_and_flags_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ENGINE_TENSOR_PARALLEL_SIZE", "4")
    monkeypatch.setenv("HEADRACE_ENGINE_THREADS", "3")
    assert arguments().tensor_parallel_size == 4
    assert arguments().threads == 3
    assert arguments("--tensor-parallel-size", "2").tensor_parallel_size == 2


def test_a_file_of_keys_means_that_requests_need_one(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: []")
    assert arguments("--api-keys-file", str(keys)).api_keys
    assert not arguments().api_keys


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--max-num-seqs 0 --block-size x", "--block-size x: .*; --max-num-seqs 0: "),
        ("--max-model-len 0", r"^--max-model-len 0: [^;]*$"),
        ("--tool-call-parser hermse", "--tool-call-parser hermse: .*'hermes'"),
        ("--chat-template absent.jinja", "--chat-template: absent.jinja is not a file here: "),
        ("--chat-template {{x}}", "write the template into a file"),
        ("--api-keys-file absent", "`headrace keys create NAME --file absent` makes it"),
        ("--policy-options x", "--policy-options x: is not valid: give JSON"),
        ("--metrics-port 1", "--metrics-port cannot be given to `headrace up`: "),
        ("--redis-url redis://x", "use --redis"),
        ("--node-rank 1 --nnodes 2", "--node-rank 1 has no gateway .*: use `headrace engine`"),
    ],
)
def test_wrong_flags_are_named_before_anything_starts(words: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        arguments(*words.split())


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ENGINE_BLOCK_SIZE", "0")
    with pytest.raises(UsageError, match=r"--block-size \(HEADRACE_ENGINE_BLOCK_SIZE\): "):
        arguments()


@pytest.mark.parametrize(("process", "flag"), [("engine", "--dtype"), ("gateway", "--console")])
def test_the_help_of_a_process_is_printed_without_starting_it(
    process: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "execv")
    done = CliRunner().invoke(app, [process, "--max-model-len", "3", "--help"])
    assert done.exit_code == 0
    assert f"usage: headrace {process} " in done.stdout and f"\n  {flag}" in done.stdout


def test_ups_own_flags_may_be_anywhere() -> None:
    params, others = of_up("--dtype", "auto", "--engines", "2", "--", "--threads=1", "--port=81")
    assert (params["engines"], params["port"]) == (2, 81)
    assert others == ["dtype", "threads"]


def test_a_model_may_be_given_without_its_flag() -> None:
    assert of_up("tiny", "--enforce-eager")[0]["model"] == "tiny"
    with pytest.raises(UsageError, match="unexpected argument 'tiny'"):
        of_up("--model", "m", "tiny")
    with pytest.raises(UsageError, match="did you mean --gateways"):
        of_up("--gateway", "2")


def test_a_flag_is_written_as_processes_expect_it() -> None:
    assert Flag("enable_lora", "false", "").word(switch=True) == "--no-enable-lora"
    assert Flag("max_num_seqs", "7", "").word(switch=False) == "--max-num-seqs=7"
