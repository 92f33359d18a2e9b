"""Converts text to token ids and back, with the `tokenizers` library only.

Reads a checkpoint's tokenizer.json, tokenizer_config.json, special_tokens_map.json,
generation_config.json and config.json. Special tokens that a user writes into a chat message stay
plain text: only the chat template's own become tokens. Never imports transformers or torch.
"""

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from .checkpoint import CheckpointFiles, read_files
from .errors import TokenizerError
from .long_text import PIECE_CHARS, pieces

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
METASPACE = "\u2581"
_NUMBERS = (int, float, bool)
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
# The last step of Llama's decoders: it removes the first space of the text.
_STRIPPED = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class Tokenizer:
    """A loaded tokenizer. Immutable, and safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int],
        model_vocab_size: int | None = None,
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.eos_token_ids = tuple(eos_token_ids)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocab.values(), default=-1)
        # No token stands for more characters than this: a byte-level token has one letter for each
        # byte.
        self.max_token_chars = max(map(len, vocab), default=1)
        # Checkpoints pad their embeddings: ids beyond the tokenizer's own still belong to the
        # model.
        self.model_vocab_size = model_vocab_size or self.vocab_size
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._special_texts = {added[i].content: i for i in self.special_ids}
        self._special_pattern = _any_of(self._special_texts)
        self._added_ids = frozenset(added)
        self.added_tokens = {token.content: i for i, token in added.items()}
        self._byte_level = "ByteLevel" in repr(backend.decoder)
        # Whether unknown characters are spelled with <0xNN> tokens, one for each byte.
        self.byte_fallback = "ByteFallback" in repr(backend.decoder)
        self._context_free = _is_context_free(backend)
        self._fixed_texts: dict[int, str | None] = {}
        # Equal ids are one object: requests have millions of them, and each object takes 32 bytes.
        self._shared_ids: dict[int, int] = {}
        # 64 bits in few characters, as a text may have millions of placeholders.
        self._nonce = "".join(chr(0xE100 + byte) for byte in secrets.token_bytes(8))

    @classmethod
    def load(cls, source: str | Path, revision: str | None = None) -> "Tokenizer":
        """Loads from a folder or a hub id. Raises TokenizerError, which names the file at fault."""
        return cls.from_files(read_files(source, revision))

    @classmethod
    def from_files(cls, files: CheckpointFiles) -> "Tokenizer":
        """Loads from a checkpoint's files. Raises TokenizerError as above."""
        backend = _read_backend(files)
        config = files.json("tokenizer_config.json")
        specials = _special_tokens(config, files.json("special_tokens_map.json"))
        _add_missing_tokens(backend, config, specials)
        model = files.json("config.json")
        generation = files.json("generation_config.json")
        return cls(
            backend,
            special_tokens=specials,
            eos_token_ids=_eos_ids(backend, specials, generation, model),
            model_vocab_size=_vocab_size(model),
        )

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        most: int | None = None,
        check: Callable[[], None] | None = None,
    ) -> list[int]:
        """Token ids of a whole prompt, as from transformers: special tokens in it are recognised.

        If a long text has more than `most` tokens, only its first ones are returned, more than
        `most` of them. Raises NoCut for a text of millions of characters without blanks. Calls
        `check` between the pieces of a long text; what it raises ends the work.
        """
        return self._encode(self._backend, text, add_special_tokens, most, check)

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts as cross-encoders read them, with the tokens between them."""
        (encoded,) = self._backend.encode_batch_fast([(first, second)], add_special_tokens=True)
        return self._shared(encoded.ids)

    def protect(self, value: Any) -> Any:
        """A copy of JSON-like data whose special tokens are distinguishable from a template's."""
        # Looking for abstract types takes many times as long.
        if self._special_pattern is None or value is None or type(value) in _NUMBERS:
            return value
        if isinstance(value, str):
            return self._special_pattern.sub(lambda match: self._placeholders[match[0]], value)
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        return value

    def unprotect(self, text: str) -> str:
        """Undoes `protect` on a rendered text."""
        if self._nonce not in text:
            return text
        return self._placeholder_pattern.sub(lambda match: self._originals[match[0]], text)

    def encode_protected(
        self,
        text: str,
        *,
        add_special_tokens: bool = False,
        most: int | None = None,
        check: Callable[[], None] | None = None,
    ) -> list[int]:
        """Token ids of a rendered chat, like `encode`; special tokens hidden by `protect` are text.

        If a user wrote any, the template's own are renamed, and a tokenizer that knows only the new
        names is used, so that nothing in the user's text can be a special token.
        """
        if self._nonce not in text or self._special_pattern is None:
            return self.encode(text, add_special_tokens=add_special_tokens, most=most, check=check)
        plain = self.unprotect(
            self._special_pattern.sub(lambda match: self._aliases[match[0]], text)
        )
        return self._encode(self._renamed_backend, plain, add_special_tokens, most, check)

    def _encode(
        self,
        backend: tokenizers.Tokenizer,
        text: str,
        special: bool,
        most: int | None,
        check: Callable[[], None] | None,
    ) -> list[int]:
        def encode(piece: str, *, special: bool) -> list[int]:
            # The batch call releases the GIL; `encode` does not.
            (encoded,) = backend.encode_batch_fast([piece], add_special_tokens=special)
            return self._shared(encoded.ids)

        if len(text) <= PIECE_CHARS:
            return encode(text, special=special)
        plain = partial(encode, special=False)
        before, after = self._around if special else ((), ())
        ids = list(before)
        for piece in pieces(text, plain):
            if check is not None:
                check()
            ids += plain(piece)
            if most is not None and len(ids) > most:
                return ids
        return [*ids, *after] if after else ids

    def _shared(self, ids: Sequence[int]) -> list[int]:
        """The ids, in which equal ones are one object."""
        share = self._shared_ids.setdefault
        return [share(token_id, token_id) for token_id in ids]

    @cached_property
    def _around(self) -> tuple[Sequence[int], Sequence[int]]:
        """The special tokens before and after every text."""
        plain = self._backend.encode("a", add_special_tokens=False).ids
        whole = self._backend.encode("a", add_special_tokens=True).ids
        before = next(n for n in range(len(whole)) if whole[n : n + len(plain)] == plain)
        return whole[:before], whole[before + len(plain) :]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; unknown ids have no text."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def fixed_text(self, token_id: int) -> str | None:
        """The text of a token if it is the same after every text that ends with a whole character.

        None if it depends on neighbours or on skipped tokens, or is unknown.
        """
        try:
            return self._fixed_texts[token_id]
        except KeyError:
            text = self._find_fixed_text(token_id) if self._context_free else None
            if 0 <= token_id < self.vocab_size:
                self._fixed_texts[token_id] = text
            return text

    def _find_fixed_text(self, token_id: int) -> str | None:
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._added_ids:
            return None
        if self._byte_level:
            if not _byte_alphabet().keys() >= set(token):
                return None
            try:
                text = _unfold_bytes(token).decode()
            except UnicodeDecodeError:  # a part of a character
                return None
        elif _BYTE_TOKEN.fullmatch(token):
            return None
        else:
            text = token.replace(METASPACE, " ")
        return None if "\ufffd" in text else text

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token."""
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 of one token, which may be a part of a character; empty for an unknown id."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_ids:
            return token.encode()
        if self._byte_level:
            return _unfold_bytes(token)
        if self.byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace(METASPACE, " ").encode()

    def to_json(self) -> str:
        """The whole tokenizer in the format of tokenizer.json, with tokens from other files."""
        return self._backend.to_str()

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    # A text may have millions of special tokens, so replacements are made once for each kind.

    @cached_property
    def _placeholders(self) -> Mapping[str, str]:
        """What stands for each special token in a protected text."""
        return self._named("\ue000", "\ue001")

    @cached_property
    def _originals(self) -> Mapping[str, str]:
        return {placeholder: text for text, placeholder in self._placeholders.items()}

    @cached_property
    def _aliases(self) -> Mapping[str, str]:
        """The names of special tokens in the renamed tokenizer."""
        return self._named("\ue002", "\ue003")

    def _named(self, begin: str, end: str) -> Mapping[str, str]:
        return {
            text: f"{begin}{self._nonce}{token_id}{end}"
            for text, token_id in self._special_texts.items()
        }

    @cached_property
    def _placeholder_pattern(self) -> re.Pattern[str]:
        return re.compile(f"\ue000{self._nonce}[0-9]+\ue001")

    @cached_property
    def _renamed_backend(self) -> tokenizers.Tokenizer:
        description = json.loads(self._backend.to_str())
        for token in description["added_tokens"]:
            if token["special"]:
                token["content"] = self._aliases[token["content"]]
                token["normalized"] = False
        _rename_in_model(description["model"], self._aliases)
        return tokenizers.Tokenizer.from_str(json.dumps(description))


def _is_context_free(backend: tokenizers.Tokenizer) -> bool:
    """Whether each token adds its own text: GPT-2's bytes, or words with Llama's spelled bytes."""
    if backend.decoder is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True
    metaspace = {"type": "Replace", "pattern": {"String": METASPACE}, "content": " "}
    return kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and (
        steps[0] == metaspace and all(step == _STRIPPED for step in steps[3:])
    )


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones are themselves, the others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


def _unfold_bytes(token: str) -> bytes:
    alphabet = _byte_alphabet()
    if all(letter in alphabet for letter in token):
        return bytes(alphabet[letter] for letter in token)
    return token.encode()


def _any_of(texts: Mapping[str, int]) -> re.Pattern[str] | None:
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _rename_in_model(model: dict[str, Any], names: Mapping[str, str]) -> None:
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): index for text, index in vocab.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]


def _read_backend(files: CheckpointFiles) -> tokenizers.Tokenizer:
    path = f"{files.origin}/tokenizer.json"
    content = files.contents.get("tokenizer.json")
    if content is None:
        raise TokenizerError(
            f"{path} is missing: save the tokenizer with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    # Each call has one text: threads of the library would gain nothing, and warn at a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:
        raise TokenizerError(f"{path}: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in reversed(sources):
        for name in SPECIAL_NAMES:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], specials: Mapping[str, str]
) -> None:
    """Adds tokens that only tokenizer_config.json declares, by id, as transformers does."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    for _, token in sorted(declared.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            known.add(token["content"])
            backend.add_tokens([_added_token(token)])
    for text in specials.values():
        if text not in known:
            known.add(text)
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _added_token(token: Mapping[str, Any]) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(token["content"], **{name: bool(token.get(name, False)) for name in flags})


def _eos_ids(
    backend: tokenizers.Tokenizer,
    specials: Mapping[str, str],
    generation: Mapping[str, Any],
    model: Mapping[str, Any],
) -> tuple[int, ...]:
    """Generation stops at the tokenizer's eos and at all that generation_config.json names."""
    configured = generation.get("eos_token_id", model.get("eos_token_id"))
    ids = list(configured) if isinstance(configured, list) else [configured]
    if "eos_token" in specials:
        ids.insert(0, backend.token_to_id(specials["eos_token"]))
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))


def _vocab_size(model: Mapping[str, Any]) -> int | None:
    text_model = model.get("text_config")
    size = (text_model if isinstance(text_model, dict) else model).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None
