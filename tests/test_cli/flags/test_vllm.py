"""vLLM's flags are translated, reported as unnecessary, or refused with the flag to use instead."""

import json
from pathlib import Path

import pytest
import typer

from headrace_cli.commands.up_command import process_words
from headrace_cli.errors import UsageError
from headrace_cli.flags.assignment import known_flags
from headrace_cli.flags.flag import Arity
from headrace_cli.flags.given_flags import GivenFlags, given_flags
from headrace_cli.flags.vllm import FLAGS, Absent, Needless, Renamed, Same
from headrace_cli.main import app
from headrace_testing.pages.vllm import PAGE, page


def own_flags() -> set[str]:
    """The settings that are options of `headrace up`."""
    up = typer.main.get_command(app).commands["up"]  # type: ignore[attr-defined]
    return {name.lstrip("-").replace("-", "_") for one in up.params for name in one.opts}


def given(*words: str) -> GivenFlags:
    own = dict.fromkeys(own_flags(), Arity.ONE)
    return given_flags(words, {**known_flags(), **own})


def values(*words: str) -> list[tuple[str, str]]:
    return [(flag.name, flag.value) for flag in given(*words).flags]


def test_the_page_matches_the_table() -> None:
    assert PAGE.read_text() == page(), "`make generated` writes it anew"


def test_flags_of_the_table_exist_in_headrace_or_only_in_vllm() -> None:
    here = known_flags().keys() | own_flags()
    assert {name for name, entry in FLAGS.items() if isinstance(entry, Same)} <= here
    assert {entry.to for entry in FLAGS.values() if isinstance(entry, Renamed)} <= here
    assert not here & {n for n, entry in FLAGS.items() if isinstance(entry, Needless | Absent)}


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("--gpu-memory-utilization 0.8", [("memory_utilization", "0.8")]),
        ("-tp 4 -dp=2", [("tensor_parallel_size", "4"), ("engines", "2")]),
        ("--dtype half", [("dtype", "float16")]),
        ("--max-model-len 1k", [("max_model_len", "1000")]),
        ("--max_model_len=1.5K", [("max_model_len", "1536")]),
        ("--max-num-batched-tokens 8192", [("max_num_batched_tokens", "8192")]),
        ("--quantization awq_marlin", [("quantization", "awq")]),
        ("--uvicorn-log-level info", [("log_level", "INFO")]),
        ("--no-enable-prefix-caching", [("enable_prefix_caching", "false")]),
    ],
)
def test_flags_of_the_same_meaning_are_translated(words: str, flags: list[tuple[str, str]]) -> None:
    assert values(*words.split()) == flags


def test_adapters_may_be_given_as_objects() -> None:
    module = '{"name": "sql", "path": "/a/sql", "base_model_name": "m"}'
    assert values("--lora-modules", module, "b=/b") == [
        ("lora_modules", '{"sql": "/a/sql"}'),
        ("lora_modules", "b=/b"),
    ]


def test_further_names_become_aliases() -> None:
    found = dict(values("--served-model-name", "a", "b", "c", "--enforce-eager"))
    assert found["served_model_name"] == "a"
    assert json.loads(found["model_aliases"]) == {"b": "a", "c": "a"}


def test_unnecessary_flags_are_left_out_and_named() -> None:
    found = given("--enable-auto-tool-choice", "--trust-remote-code", "--tokenizer-mode", "auto")
    assert found.flags == ()
    assert [note.partition(" ")[0] for note in found.notes] == [
        "--enable-auto-tool-choice",
        "--trust-remote-code",
        "--tokenizer-mode",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--api-key k", "there is no --api-key: use --api-keys-file FILE; `headrace keys create"),
        ("--seed 0", "give `seed` in requests"),
        ("--pipeline-parallel-size 2", "use --tensor-parallel-size"),
        ("--ssl-keyfile f", "end TLS at a proxy"),
        ("--load-format dummy", "--load-format dummy: safetensors are read"),
        ("--gpu-memory-utilisation 0.8", "did you mean --gpu-memory-utilization?"),
    ],
)
def test_unsupported_flags_are_refused_with_a_replacement(words: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        given(*words.split())


def test_flags_of_the_command_line_take_precedence_over_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: Qwen/Qwen3-0.6B\n"
        "served-model-name: [a, b]\n"
        "port: 9000\n"
        "gpu-memory-utilization: 0.5\n"
        "enforce-eager: true\n"
        "enable_prefix_caching: false\n"
        "speculative-config: {method: ngram}\n"
        "trust-remote-code: true\n"
    )
    found = given("--config", str(file), "--memory-utilization", "0.7")
    assert dict((flag.name, flag.value) for flag in found.flags) == {
        "model": "Qwen/Qwen3-0.6B",
        "served_model_name": "a",
        "model_aliases": '{"b": "a"}',
        "port": "9000",
        "memory_utilization": "0.7",
        "enforce_eager": "true",
        "enable_prefix_caching": "false",
        "speculative_config": '{"method": "ngram"}',
    }
    assert [note.split()[0] for note in found.notes] == [
        "--gpu-memory-utilization",
        "--trust-remote-code",
    ]
    assert "model" not in dict(values("tiny", "--config", str(file)))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot read .* \\(No such file"),
        ("a: [", "is not YAML"),
        ("- a", "has no flags"),
        ("dtyp: half", "no flag --dtyp: did you mean --dtype"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, text: str | None, told: str) -> None:
    file = tmp_path / "config.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=told):
        given("--config", str(file))


def test_engines_and_gateways_take_them_too() -> None:
    assert process_words("engine", ["--model", "m", "-tp", "2", "--enforce-eager"]) == [
        "--model=m",
        "--tensor-parallel-size=2",
        "--enforce-eager",
    ]
    assert process_words("gateway", ["--no-console", "--help"]) == ["--help"]
    with pytest.raises(
        UsageError, match="--max-num-seqs is not a flag .* one of `headrace engine`"
    ):
        process_words("gateway", ["--max-num-seqs", "3"])
    with pytest.raises(UsageError, match="-dp is not a flag .* one of `headrace up`"):
        process_words("engine", ["-dp", "3"])
    with pytest.raises(UsageError, match="unexpected argument 'tiny'"):
        process_words("engine", ["tiny"])


def test_serve_is_up() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    context = commands["serve"].make_context("serve", ["tiny", "-dp", "2"])
    assert (context.params["model"], context.params["engines"]) == ("tiny", 2)
