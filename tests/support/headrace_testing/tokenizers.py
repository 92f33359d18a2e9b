"""Tiny real tokenizers, trained on the fly and saved as in a checkpoint folder."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from .tool_templates import CHATML_WITH_TOOLS

CORPUS = (
    "Hello world, this is a small text about water that drives a mill.",
    "The quick brown fox jumps over the lazy dog. Once upon a time there was a stream.",
    "naïve café, 你好世界, こんにちは, Привет мир, 🙂🙃🦊 and more of it: 0 1 2 3 4 5 6 7 8 9",
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' "
    "+ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_level_tokenizer(vocab_size: int = 400) -> tokenizers.Tokenizer:
    """Byte-level BPE like that of GPT-2, Llama 3 and Qwen."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def harmony_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer with the special tokens of gpt-oss."""
    backend = byte_level_tokenizer()
    names = ("return", "constrain", "channel", "start", "end", "message", "call")
    backend.add_special_tokens(
        [AddedToken(f"<|{name}|>", special=True, normalized=False) for name in names]
    )
    return backend


def metaspace_tokenizer(vocab_size: int = 400) -> tokenizers.Tokenizer:
    """SentencePiece-like BPE with byte fallback, like that of Llama 2 and Mistral."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size + 300,
        special_tokens=["<unk>", "<s>", "</s>", *byte_tokens],
        limit_alphabet=60,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _only_named_specials(backend)


def _only_named_specials(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Makes the byte tokens ordinary tokens of the vocabulary instead of special ones."""
    description = json.loads(backend.to_str())
    description["added_tokens"] = description["added_tokens"][:3]
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def write_checkpoint(
    folder: Path,
    backend: tokenizers.Tokenizer,
    *,
    chat_template: str | None = CHATML,
    config: dict[str, Any] | None = None,
    **tokenizer_config: Any,
) -> Path:
    """Saves the part of a checkpoint that a gateway reads; the folder has no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer_config}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_tool_checkpoint(folder: Path, chat_template: str = CHATML_WITH_TOOLS) -> Path:
    """Writes, like `write_checkpoint`, a model that calls tools and has a context of 4,096
    tokens."""
    return write_checkpoint(
        folder,
        byte_level_tokenizer(),
        chat_template=chat_template,
        config={"vocab_size": 512, "max_position_embeddings": 4096},
        eos_token="<|im_end|>",
    )
