"""`headrace models`: on folders, and against a small hub.

Pulls and one check are processes. Other checks run in this process, which has already imported
torch; `ask_here` replaces their two child processes.
"""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from headrace_cli.models import check
from headrace_common.text.checkpoint import demo_folder
from headrace_testing.checkpoints import save_checkpoint
from headrace_testing.fake_hub import FakeHub
from headrace_testing.gguf_checkpoints import save_gguf
from headrace_testing.gguf_files import sentencepiece_values, write_tokenizer_gguf
from headrace_testing.in_process import headrace

REPOSITORY = "team/tiny"


def models(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace_cli", "models", *args],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "NO_PROXY": "127.0.0.1", **env},
    )


def on_hub(hub: FakeHub | str, cache: Path) -> dict[str, str]:
    url = hub if isinstance(hub, str) else hub.address
    return {"HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}


def found_of(printed: str, code: int) -> dict[str, tuple[str, str]]:
    """What each check found, and its level, from the output of a command with this exit code."""
    found = json.loads(printed)
    assert found["servable"] is (code == 0)
    return {each["check"]: (each["level"], each["found"]) for each in found["findings"]}


@pytest.fixture
def ask_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the programs that describe a checkpoint in this process."""

    def ask(module: str, folder: Path, *_ranks: str) -> dict[str, Any]:
        with redirect_stdout(io.StringIO()) as printed:
            import_module(module).main(str(folder))
        found: dict[str, Any] = json.loads(printed.getvalue())
        return found

    monkeypatch.setattr(check, "_ask", ask)


def checked(model: Path | str) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code, and the level and text of each check's finding."""
    done = headrace("models", "check", str(model), "--json")
    assert done.stderr == ""
    return done.returncode, found_of(done.stdout, done.returncode)


@contextmanager
def cached_from(hub: FakeHub, cache: Path) -> Iterator[None]:
    """Makes this process fetch from a hub; it read the variables for that when it began."""
    files = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    values: dict[str, Any] = {
        "ENDPOINT": hub.address,
        "HUGGINGFACE_CO_URL_TEMPLATE": files,
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_HUB_OFFLINE": False,
    }
    tqdm = "huggingface_hub.utils.tqdm.HF_HUB_DISABLE_PROGRESS_BARS"
    with patch.multiple("huggingface_hub.constants", **values), patch(tqdm, True):
        yield


def changed(folder: Path, **fields: Any) -> Path:
    """A copy of the checkpoint with changed fields in config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def test_the_demo_model_is_native_and_chats() -> None:
    done = models("check", "headrace-demo", "--json")
    found = found_of(done.stdout, done.returncode)

    assert (done.returncode, done.stderr) == (0, "")
    assert found["engine"][1].startswith("LlamaForCausalLM: native, ")
    assert found["context"] == ("ok", "2048 tokens")
    assert found["quantisation"] == ("ok", "none")
    assert found["chat template"] == ("ok", "found")
    assert found["tool calls"] == ("ok", "hermes")
    assert found["reasoning"] == ("ok", "qwen3")
    assert "KV 3.5 KiB a token, 7.0 MiB for a whole context" in found["size"][1]


@pytest.mark.usefixtures("ask_here")
def test_a_gguf_file_is_checked(tmp_path: Path) -> None:
    file, _ = save_gguf(tmp_path, "qwen3", lambda _: "Q8_0")
    code, found = checked(file)

    assert code == 0
    assert found["engine"][1].startswith("Qwen3ForCausalLM: native, bfloat16")
    assert found["quantisation"] == ("ok", "gguf")
    assert found["tokenizer"][0] == "ok"


@pytest.mark.usefixtures("ask_here")
def test_a_gguf_file_of_the_hub_is_fetched_by_its_name(tmp_path: Path) -> None:
    file = write_tokenizer_gguf(tmp_path / "a.gguf", sentencepiece_values({"a": -1.0}))
    content = file.read_bytes()
    files = {"Q4_K_M.gguf": content, "Q8_0.gguf": content, "config.json": b"{}"}
    with FakeHub(REPOSITORY, files) as hub, cached_from(hub, tmp_path):
        code, found = checked(REPOSITORY)
        assert code == 1
        assert "has 2 GGUF files: name one of them" in found["model"][1]
        assert "There are Q4_K_M.gguf, Q8_0.gguf" in found["model"][1]
        code, found = checked(f"{REPOSITORY}/Q8_0.gguf")
        assert found["tokenizer"] == ("ok", "260 tokens")
        assert found["engine"][1].startswith("LlamaForCausalLM: native")
        pulled = models("pull", f"{REPOSITORY}/Q8_0.gguf", "--json", **on_hub(hub, tmp_path))
    assert code == 0 and "Q4_K_M.gguf" not in hub.fetched
    assert json.loads(pulled.stdout)["folder"].endswith("/Q8_0.gguf")
    assert json.loads(pulled.stdout)["bytes"] == len(content)


@pytest.mark.usefixtures("ask_here")
def test_the_only_gguf_file_of_a_repository_needs_no_name(tmp_path: Path) -> None:
    file = write_tokenizer_gguf(tmp_path / "a.gguf", sentencepiece_values({"a": -1.0}))
    files = {"only.gguf": file.read_bytes(), "config.json": b"{}"}
    with FakeHub(REPOSITORY, files) as hub, cached_from(hub, tmp_path):
        code, found = checked(REPOSITORY)
    assert code == 0
    assert found["tokenizer"] == ("ok", "260 tokens")


@pytest.mark.usefixtures("ask_here")
def test_formats_are_read_from_the_chat_template(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", "llama")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}<tool_call></tool_call><think></think>"
    )
    _, found = checked(folder)

    assert found["tool calls"] == ("ok", "hermes")
    assert found["reasoning"][1] != "none"


@pytest.mark.usefixtures("ask_here")
def test_a_model_without_a_native_implementation_is_a_warning(tmp_path: Path) -> None:
    folder = changed(save_checkpoint(tmp_path / "m", "llama"), architectures=["OtherForCausalLM"])
    code, found = checked(folder)

    assert code == 0
    assert found["engine"][0] == "warning"
    assert "OtherForCausalLM: not native, through transformers" in found["engine"][1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization_config": {"quant_method": "secret"}}, "quant_method"),
        (
            {"architectures": ["Y"], "model_type": "y", "auto_map": {"AutoModel": "x.Y"}},
            "auto_map names code of the checkpoint, which is never run",
        ),
    ],
)
@pytest.mark.usefixtures("ask_here")
def test_an_unsupported_model_is_a_failure(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = changed(save_checkpoint(tmp_path / "m", "llama"), **fields)
    code, found = checked(folder)

    assert code == 1
    assert found["engine"][0] == "fail" and message in found["engine"][1]


@pytest.mark.usefixtures("ask_here")
def test_a_table_has_a_row_for_each_check() -> None:
    done = headrace("models", "check", "headrace-demo")

    assert done.returncode == 0
    assert any(line.startswith("ok  tokenizer") for line in done.stdout.splitlines())


@pytest.mark.usefixtures("ask_here")
def test_a_pull_fetches_what_engines_read_and_no_code(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in demo_folder().iterdir() if path.is_file()}
    with FakeHub(REPOSITORY, {**files, "evil.py": b"x", "old.bin": b"x"}) as hub:
        done = models("pull", REPOSITORY, **on_hub(hub, tmp_path))
        asked = sorted(hub.fetched)
        again = models("pull", REPOSITORY, "--json", **on_hub(hub, tmp_path))
        with cached_from(hub, tmp_path):
            code, found = checked(REPOSITORY)

    folder = Path(done.stdout.strip())
    assert (done.returncode, done.stderr) == (0, "")
    assert asked == sorted(path.name for path in folder.iterdir())
    assert "model.safetensors" in asked and not {"evil.py", "old.bin"} & set(asked)
    assert json.loads(again.stdout)["folder"] == str(folder)
    assert json.loads(again.stdout)["bytes"] == sum(len(files[name]) for name in asked)
    assert code == 0 and "native" in found["engine"][1]


def test_a_pull_continues_where_it_stopped(tmp_path: Path) -> None:
    weights = bytes(range(256)) * 100_000  # the client writes pieces of 10 MB
    files = {"config.json": b"{}", "model.safetensors": weights}
    with FakeHub(REPOSITORY, files, cut_once="model.safetensors") as hub:
        for _ in range(2):
            done = models("pull", REPOSITORY, **on_hub(hub, tmp_path))
        ranges = hub.ranges

    assert done.returncode == 0
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == weights
    assert [each for each in ranges if each.startswith("model.safetensors bytes=")]


@pytest.mark.usefixtures("ask_here")
def test_a_check_of_the_hub_fetches_no_weights(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in demo_folder().iterdir() if path.is_file()}
    with FakeHub(REPOSITORY, files) as hub, cached_from(hub, tmp_path):
        code, found = checked(REPOSITORY)
        fetched = hub.fetched

    assert code == 0
    assert found["model"][0] == "warning" and "weights 8.9 MiB" in found["size"][1]
    assert "config.json" in fetched and "model.safetensors" not in fetched


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        ("team/tiny", 1, "team/tiny: the hub cannot be reached (ConnectionRefusedError)"),
        ("a/b/c", 2, "'a/b/c' is not a hub id"),
        (".", 2, ". is a folder on this machine"),
    ],
)
def test_a_failed_pull_is_one_line(tmp_path: Path, model: str, code: int, message: str) -> None:
    done = models("pull", model, **on_hub("http://127.0.0.1:1", tmp_path))

    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_an_unknown_repository_is_one_line(tmp_path: Path) -> None:
    with FakeHub(REPOSITORY, {}) as hub:
        done = models("pull", "team/other", **on_hub(hub, tmp_path))

    assert done.returncode == 1
    assert done.stderr == "error: the hub has no team/other, or HF_TOKEN may not read it\n"
