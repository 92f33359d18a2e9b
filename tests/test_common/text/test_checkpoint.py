"""A checkpoint's small files: which ones are read, from where, and how much of them."""

from pathlib import Path

import pytest

from headrace_common.text import checkpoint
from headrace_common.text.chat_template import find_chat_template
from headrace_common.text.checkpoint import (
    DEMO_EMBEDDINGS,
    DEMO_MODEL,
    DEMO_VISION,
    CheckpointFiles,
    read_files,
    resolve,
)
from headrace_common.text.errors import TokenizerError
from headrace_common.text.tokenizer import Tokenizer
from headrace_testing.tokenizers import byte_level_tokenizer, write_checkpoint


@pytest.mark.parametrize("name", [DEMO_MODEL, DEMO_EMBEDDINGS, DEMO_VISION])
def test_a_bundled_model_is_found_by_name_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)

    assert (resolve(name) / "config.json").is_file()
    assert resolve(f"./{name}") == Path(name)


def test_files_from_memory_make_the_same_tokenizer_and_template(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, byte_level_tokenizer(), config={"vocab_size": 512})
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    files = read_files(tmp_path)
    text = "Hello <|im_start|>"

    assert files.contents.keys() == {"tokenizer.json", "tokenizer_config.json", "config.json"}
    tokenizer = Tokenizer.from_files(CheckpointFiles("elsewhere", dict(files.contents)))
    assert tokenizer.encode(text) == Tokenizer.load(tmp_path).encode(text)
    assert tokenizer.model_vocab_size == 512
    own = find_chat_template(files, tokenizer)
    other = find_chat_template(files.with_chat_template("näher".encode()), tokenizer)
    assert own is not None and "im_start" in own.source
    assert other is not None and other.source == "näher"


def test_too_many_bytes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MAX_FILES_BYTES", 10)
    (tmp_path / "tokenizer.json").write_bytes(bytes(6))
    (tmp_path / "config.json").write_bytes(bytes(5))

    with pytest.raises(TokenizerError, match="have 11 bytes, over the limit of 10"):
        read_files(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "x/config.json: "), (b"[]", "must hold a JSON object, not list"), (b"\xff", "utf-8")],
)
def test_a_file_that_cannot_be_read_is_named(content: bytes, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        CheckpointFiles("x", {"config.json": content}).json("config.json")


def test_a_template_that_is_not_text_is_named() -> None:
    with pytest.raises(TokenizerError, match=r"x/chat_template\.jinja"):
        CheckpointFiles("x", {"chat_template.jinja": b"\xff"}).text("chat_template.jinja")
