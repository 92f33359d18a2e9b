"""GGUF files: the tokenizer and the configuration that a file's metadata describes. A file that
cannot be read is refused, by file and key."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from headrace_common.text.chat_template import load_chat_template
from headrace_common.text.checkpoint import DEMO_MODEL, default_name, demo_folder, read_files
from headrace_common.text.errors import ModelNotFound, TokenizerError
from headrace_common.text.gguf import header
from headrace_common.text.gguf.header import read_header
from headrace_common.text.gguf.tokenizer import PRE_TOKENIZERS
from headrace_common.text.tokenizer import Tokenizer
from headrace_testing.gguf_files import (
    TINY,
    byte_level_values,
    model_values,
    read_tokenizer,
    sentencepiece_values,
    tiny_tensors,
    write_gguf,
    write_tokenizer_gguf,
)
from headrace_testing.tokenizers import CHATML, metaspace_tokenizer

TEXTS = (
    "",
    " ",
    "Hello world, this is a text.",
    "  two  spaces,\ttabs\t\tand\n\n\nlines \r\n ",
    "I'll say you'RE it's 'quoted' don't",
    "1 12 123 1234567 3.14 ٣٤",
    "naïve café e\u0301 你好世界 こんにちは Привет 🙂🙃🦊 \u200b",
    "def f(x):\n    return x**2  # a comment\n\n\n",
    "<|im_start|>user\nHi<|im_end|>\n<think>deep</think> <tool_call>",
    "CamelCase snake_case https://example.com/a?b=c&d=%20",
    "<unk><s></s> <0x41>",
)
ROWS = 2048


def with_pre_tokenizer(name: str) -> tokenizers.Tokenizer:
    """The demo model's vocabulary, cut into words like the tokenizers that `name` stands for.

    The expressions are those of their published tokenizer.json files.
    """
    backend = tokenizers.Tokenizer.from_file(str(demo_folder(DEMO_MODEL) / "tokenizer.json"))
    after = r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name == "gpt-2":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif name == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    else:
        pattern = words + (after if name == "llama-bpe" else after.replace("{1,3}", ""))
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def written(backend: tokenizers.Tokenizer, folder: Path) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_a_byte_level_tokenizer_is_that_of_the_published_file(pre: str, tmp_path: Path) -> None:
    backend = with_pre_tokenizer(pre)
    values = byte_level_values(read_tokenizer(written(backend, tmp_path)), pre, ROWS + 3)
    found = Tokenizer.load(write_tokenizer_gguf(tmp_path / "model.gguf", values))
    for text in TEXTS:
        ids = found.encode(text, add_special_tokens=False)
        assert ids == backend.encode(text, add_special_tokens=False).ids, text
        assert found.decode(ids, skip_special_tokens=False) == backend.decode(
            ids, skip_special_tokens=False
        )
    assert found.vocab_size == ROWS and found.model_vocab_size == ROWS + 3
    named = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert found.special_ids == {backend.token_to_id(name) for name in named}
    assert found.fixed_text(found.token_to_id("Ġthe") or 0) == " the"


def test_special_tokens_in_messages_stay_text(tmp_path: Path) -> None:
    folder = written(with_pre_tokenizer("llama-bpe"), tmp_path)
    values = byte_level_values(read_tokenizer(folder), "llama-bpe", ROWS)
    found = Tokenizer.load(write_tokenizer_gguf(tmp_path / "model.gguf", values))
    text = found.protect("a <|im_end|> b")
    ids = found.encode_protected(f"<|im_start|>{text}")
    assert ids[0] == 1 and not found.special_ids & set(ids[1:])
    assert found.decode(ids[1:]) == "a <|im_end|> b"


def pieces_of(backend: tokenizers.Tokenizer) -> dict[str, float]:
    """The pieces of a SentencePiece model, whose scores fall with their ids."""
    names = {index: token for token, index in backend.get_vocab().items()}
    return {names[index]: -float(index) for index in range(259, len(names))}


def test_a_sentencepiece_tokenizer_is_that_of_the_published_file(tmp_path: Path) -> None:
    backend = metaspace_tokenizer()
    path = write_tokenizer_gguf(tmp_path / "m.gguf", sentencepiece_values(pieces_of(backend)))
    found = Tokenizer.load(path)
    for text in TEXTS:
        ids = found.encode(text, add_special_tokens=False)
        assert ids == backend.encode(text, add_special_tokens=False).ids, text
        assert found.decode(ids) == backend.decode(ids)
    assert found.encode("Hello")[0] == found.token_to_id("<s>")
    assert found.eos_token_ids == (2,) and found.byte_fallback
    word = next(piece for piece in pieces_of(backend) if piece.startswith("▁") and len(piece) > 2)
    assert found.fixed_text(found.token_to_id(word) or 0) == word.replace("▁", " ")


def test_a_sentencepiece_tokenizer_without_prefix_keeps_the_first_space(tmp_path: Path) -> None:
    pieces = {"▁": -1.0, "a": -2.0, "▁a": -3.0, "▁▁": -4.0}
    values = sentencepiece_values(pieces, add_space_prefix=False, add_bos_token=False)
    found = Tokenizer.load(write_tokenizer_gguf(tmp_path / "m.gguf", values))
    first = found.token_to_id("a")
    assert found.encode("a a") == [first, found.token_to_id("▁a")]
    assert found.decode(found.encode(" a")) == " a"


@pytest.mark.parametrize(
    ("pre", "changes", "around"),
    [
        ("llama-bpe", {}, (1, 0)),
        ("llama-bpe", {"add_bos_token": False}, (0, 0)),
        ("qwen2", {}, (0, 0)),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, (1, 1)),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(
    pre: str, changes: dict[str, Any], around: tuple[int, int], tmp_path: Path
) -> None:
    found = Tokenizer.load(demo_file(tmp_path, pre, **changes))
    plain = found.encode("Hi", add_special_tokens=False)
    assert found.encode("Hi") == [0] * around[0] + plain + [2] * around[1]


def demo_file(folder: Path, pre: str = "qwen2", keys: Any = None, **changes: Any) -> Path:
    """A file with the demo model's vocabulary; `changes` are keys of the tokenizer."""
    ids = {"bos_token_id": 0, "eos_token_id": 2, "padding_token_id": 0, **changes}
    values = byte_level_values(read_tokenizer(demo_folder(DEMO_MODEL)), pre, ROWS, **ids)
    return write_tokenizer_gguf(folder / "model.gguf", values, **(keys or {}))


def test_template_and_special_tokens_come_from_the_file(tmp_path: Path) -> None:
    path = demo_file(tmp_path, keys={"tokenizer__chat_template": CHATML})
    tokenizer = Tokenizer.load(path)
    template = load_chat_template(path, tokenizer)
    assert template is not None and template.source == CHATML
    assert tokenizer.special_tokens["bos_token"] == "<|endoftext|>"
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    without = demo_file(tmp_path)
    assert load_chat_template(without, Tokenizer.load(without)) is None


def test_every_token_that_ends_an_answer_ends_generation(tmp_path: Path) -> None:
    """The file names <|im_end|> and another; <|endoftext|> is known to end answers."""
    found = Tokenizer.load(demo_file(tmp_path, eot_token_id=1, bos_token_id=1))
    assert found.eos_token_ids == (2, 1, 0)


def test_the_configuration_has_the_words_of_published_ones(tmp_path: Path) -> None:
    keys = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}
    files = read_files(demo_file(tmp_path, keys=keys))
    config = files.json("config.json")
    expected = {name: value for name, value in TINY.items() if name != "rms_norm_eps"}
    assert config.items() >= {**expected, "vocab_size": ROWS, "head_dim": 16}.items()
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"]
    assert config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    assert config["dtype"] == "float32" and "quantization_config" not in config


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    path = demo_file(tmp_path)
    (tmp_path / "mmproj-model.gguf").write_bytes(b"an encoder of pictures")
    (tmp_path / "imatrix.gguf").write_bytes(b"how activations are distributed")
    assert read_files(tmp_path).origin == str(path)
    assert default_name(str(path)) == "model"


def test_of_several_files_one_must_be_named(tmp_path: Path) -> None:
    demo_file(tmp_path).rename(tmp_path / "Q8_0.gguf")
    demo_file(tmp_path).rename(tmp_path / "Q4_K_M.gguf")
    with pytest.raises(TokenizerError, match=r"2 GGUF files: .*There are Q4_K_M.gguf, Q8_0.gguf"):
        read_files(tmp_path)
    assert read_files(tmp_path / "Q8_0.gguf").contents


def test_safetensors_come_before_gguf(tmp_path: Path) -> None:
    demo_file(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert read_files(tmp_path).origin == str(tmp_path)


def test_a_missing_file_is_not_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such folder or GGUF file"):
        read_files(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "mamba"}, "general.architecture must be one of llama, qwen2"),
        ({"tokenizer__ggml__pre": "superbpe"}, "tokenizer.ggml.pre must be one of gpt-2"),
        ({"tokenizer__ggml__model": "rwkv"}, "tokenizer.ggml.model must be gpt2 or llama"),
        ({"tokenizer__ggml__merges": ["ab"]}, "tokenizer.ggml.merges must be pairs"),
        ({"tokenizer__ggml__token_type": [1]}, "tokenizer.ggml.token_type must be one number for"),
        ({"tokenizer__ggml__tokens": ["a" * 1025]}, "tokens must be texts of at most 1024"),
        ({"tokenizer__ggml__eos_token_id": ROWS}, "eos_token_id must be one of 2048 tokens"),
        ({"tokenizer__chat_template": 3}, "tokenizer.chat_template must be a text, not 3"),
        ({"llama__block_count": 0}, "llama.block_count must be a whole number above 0, not 0"),
        ({"llama__attention__value_length": 8}, "value_length must be the width of a head"),
        ({"llama__rope__scaling__type": "su"}, "scaling.type must be none, linear or yarn"),
        ({"llama__logit_scale": 2.0}, "llama.logit_scale is not supported"),
        ({"llama__attention__causal": False}, "attention.causal must be true"),
        ({"llama__expert_gating_func": 2}, r"expert_gating_func must be 1 \(softmax\), not 2"),
        ({"split__count": 3}, "is one of 3 parts of a model: join them"),
        ({"general__alignment": 4}, "general.alignment must be a multiple of 8, not 4"),
    ],
)
def test_what_cannot_be_served_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = demo_file(tmp_path, keys=changes)
    with pytest.raises(TokenizerError, match=message) as raised:
        read_files(path)
    assert str(path) in str(raised.value)


def test_scores_are_needed_for_every_piece(tmp_path: Path) -> None:
    values = {**sentencepiece_values({"a": -1.0}), "tokenizer.ggml.scores": [0.0]}
    with pytest.raises(TokenizerError, match="tokenizer.ggml.scores must be one for each of 260"):
        read_files(write_tokenizer_gguf(tmp_path / "m.gguf", values))


def test_embeddings_are_needed_for_every_token(tmp_path: Path) -> None:
    values = model_values(TINY, "llama") | sentencepiece_values({"a": -1.0})
    path = write_gguf(tmp_path / "m.gguf", values, tiny_tensors(259))
    with pytest.raises(TokenizerError, match="260 tokens, and the model has 259 embeddings"):
        read_files(path)
    without = write_gguf(tmp_path / "n.gguf", values, {"a": np.zeros((2, 2), dtype=np.float32)})
    with pytest.raises(TokenizerError, match="the tensor token_embd.weight is missing"):
        read_files(without)
    empty = write_gguf(tmp_path / "e.gguf", values, {"a": np.zeros((0, 2), dtype=np.float32)})
    with pytest.raises(TokenizerError, match="a has no elements"):
        read_files(empty)


def replaced(at: int, code: str, *values: int) -> Callable[[bytes], bytes]:
    packed = struct.pack(f"<{code}", *values)
    return lambda content: content[:at] + packed + content[at + len(packed) :]


# The first key follows the 24 bytes of magic, version and two counts.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: b"", "cannot mmap an empty file"),
        (lambda content: b"GGML" + content[4:], "is not a GGUF file: it does not begin with GGUF"),
        (lambda content: content[:4], "is cut short"),
        (lambda content: content[:5000], "is cut short"),
        (replaced(4, "I", 1), "has version 1 of GGUF"),
        (replaced(8, "Q", 2**63), "names 9223372036854775808 tensors"),
        (replaced(16, "Q", 2**62), "4611686018427387904 values"),
        (replaced(24, "Q", 2**63), "is cut short, or its header has more than"),
        (replaced(32, "B", 0xFF), "a key is not UTF-8"),
        (replaced(24 + 8 + 20, "I", 77), "has a value of the unknown type 77"),
    ],
)
def test_a_broken_header_is_refused(
    change: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    path = demo_file(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(TokenizerError, match=message):
        read_header(path)


def test_arrays_and_headers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = demo_file(tmp_path)
    monkeypatch.setattr(header, "MAX_ELEMENTS", 5000)
    with pytest.raises(TokenizerError, match="makes more than 5000 values"):
        read_header(path)
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(TokenizerError, match="its header has more than 1000 bytes"):
        read_header(path)


def test_patterns_of_all_pre_tokenizers_are_valid(tmp_path: Path) -> None:
    for pre in PRE_TOKENIZERS:
        found = Tokenizer.load(demo_file(tmp_path, pre))
        assert found.decode(found.encode("It's 12 o'CLOCK", add_special_tokens=False)) == (
            "It's 12 o'CLOCK"
        )
    assert json.loads(found.to_json())["model"]["type"] == "BPE"
