"""The tokenizer.json of a GGUF file, and the other files that say how a tokenizer is used.

`tokenizer.ggml.model` is gpt2 for byte-level BPE, with its merges, and llama for SentencePiece's
BPE, whose merges follow from the tokens' scores.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import TokenizerError
from .metadata import Metadata

KEY = "tokenizer.ggml."
# Types of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
MAX_TOKEN_CHARS = 1024
SPACE = "\u2581"
# Special tokens that end an answer in published chat models: a file names only one or two.
ENDINGS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<EOT>",
)
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_AFTER_CASES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How byte-level BPE cuts a text into words: by each of `patterns`, one after the other.

    With `whole_words`, a word that is a token is not built from merges. `bos` is whether texts
    begin with the BOS token if the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False


_LLAMA3 = PreTokenizer(
    (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_AFTER_WORDS}",), whole_words=True, bos=True
)
_QWEN2 = PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_AFTER_WORDS}",), nfc=True)
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_TEKKEN = PreTokenizer(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        rf"|\p{{N}}|{_AFTER_CASES}",
    ),
    whole_words=True,
    bos=True,
)
# By the values of tokenizer.ggml.pre.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": PreTokenizer(_LLAMA3.patterns),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "tekken": _TEKKEN,
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens by their ids, and the type of each."""

    tokens: Sequence[str]
    types: Sequence[int]

    @classmethod
    def of(cls, metadata: Metadata) -> "Vocabulary":
        tokens = metadata.texts(f"{KEY}tokens")
        if any(len(token) > MAX_TOKEN_CHARS for token in tokens):
            raise metadata.error(f"{KEY}tokens", f"texts of at most {MAX_TOKEN_CHARS} characters")
        if f"{KEY}token_type" in metadata:
            types = metadata.integers(f"{KEY}token_type")
        else:
            types = [NORMAL] * len(tokens)
        if len(types) != len(tokens):
            raise metadata.error(f"{KEY}token_type", f"one number for each of {len(tokens)} tokens")
        return cls(tokens, types)

    def ids(self) -> dict[str, int]:
        """The id of each token, without those that only pad the vocabulary."""
        return {
            token: index
            for index, token in enumerate(self.tokens)
            if not (self.types[index] == UNUSED and token == f"[PAD{index}]")
        }

    def added(self, types: Iterable[int] = (UNKNOWN, CONTROL, USER_DEFINED)) -> dict[str, int]:
        """The tokens that are found in a text before it is cut into words."""
        return {
            token: index
            for index, token in enumerate(self.tokens)
            if token and self.types[index] in types
        }


def make_tokenizer(metadata: Metadata) -> dict[str, Any]:
    """The content of tokenizer.json. Raises TokenizerError for a key that is missing, broken or not
    supported."""
    vocabulary, kind = Vocabulary.of(metadata), metadata.text(f"{KEY}model")
    if kind == "gpt2":
        parts = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        parts = _sentence_pieces(metadata, vocabulary)
    else:
        raise metadata.error(f"{KEY}model", "gpt2 or llama")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "post_processor": _post_processor(metadata, vocabulary, kind),
        **parts,
    }


def make_tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    tokens = Vocabulary.of(metadata).tokens
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = _token_id(metadata, key, len(tokens))
        if token is not None:
            found[f"{name}_token"] = tokens[token]
    if "tokenizer.chat_template" in metadata:
        found["chat_template"] = metadata.text("tokenizer.chat_template")
    return found


def make_generation_config(metadata: Metadata) -> dict[str, Any]:
    """The content of generation_config.json: the tokens that end an answer."""
    vocabulary = Vocabulary.of(metadata)
    added = vocabulary.added()
    named = [_token_id(metadata, key, len(vocabulary.tokens)) for key in ("eos", "eot", "eom")]
    ends = [*named, *(added.get(token) for token in ENDINGS)]
    return {"eos_token_id": list(dict.fromkeys(each for each in ends if each is not None))}


def _token_id(metadata: Metadata, name: str, count: int) -> int | None:
    key = f"{KEY}{name}_token_id"
    if key not in metadata:
        return None
    found = metadata.count(key, 0)
    if found >= count:
        raise metadata.error(key, f"one of {count} tokens")
    return found


def _byte_level(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    pre = PRE_TOKENIZERS.get(metadata.text(f"{KEY}pre", ""))
    if pre is None:
        raise metadata.error(f"{KEY}pre", f"one of {', '.join(PRE_TOKENIZERS)}")
    written = metadata.texts(f"{KEY}merges") if f"{KEY}merges" in metadata else []
    merges = [merge.split(" ", 1) for merge in written]
    if any(len(merge) < 2 for merge in merges):
        raise metadata.error(f"{KEY}merges", "pairs of tokens with a space between them")
    splits = [
        {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        for pattern in pre.patterns
    ]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "added_tokens": _added_tokens(vocabulary, vocabulary.added()),
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, {**bytes_, "use_regex": False}],
        },
        "decoder": {**bytes_, "use_regex": True},
        "model": _model(vocabulary, merges, ignore_merges=pre.whole_words),
    }


def _sentence_pieces(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    scores = metadata.numbers(f"{KEY}scores")
    if len(scores) != len(vocabulary.tokens):
        raise metadata.error(f"{KEY}scores", f"one for each of {len(vocabulary.tokens)} tokens")
    spaces = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if metadata.flag(f"{KEY}add_space_prefix", True):
        spaces.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = _token_id(metadata, "unknown", len(vocabulary.tokens))
    # Tokens with spaces are made by merges, since a text's own spaces are replaced later.
    added = {token: index for token, index in vocabulary.added().items() if SPACE not in token}
    return {
        "added_tokens": _added_tokens(vocabulary, added),
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(
            vocabulary,
            _merges_by_score(vocabulary, scores),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _merges_by_score(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a third one; the best score is merged first."""
    pieces = vocabulary.added((NORMAL, USER_DEFINED))
    best_first = sorted(pieces.items(), key=lambda piece: -scores[piece[1]])
    return [
        (piece[:cut], piece[cut:])
        for piece, _ in best_first
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _model(vocabulary: Vocabulary, merges: Iterable[Sequence[str]], **options: Any) -> Any:
    defaults = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    own = {"vocab": vocabulary.ids(), "merges": [list(merge) for merge in merges]}
    return {"type": "BPE", **defaults, **options, **own}


def _added_tokens(vocabulary: Vocabulary, added: Mapping[str, int]) -> list[dict[str, Any]]:
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": vocabulary.types[index] != USER_DEFINED,
        }
        for token, index in added.items()
    ]


def _post_processor(metadata: Metadata, vocabulary: Vocabulary, kind: str) -> dict[str, Any] | None:
    """Puts BOS before every text and EOS after it, as far as the file says so."""
    pre = PRE_TOKENIZERS.get(metadata.text(f"{KEY}pre", ""))
    usual = kind == "llama" or (pre is not None and pre.bos)
    named = {}
    for name, default in (("bos", usual), ("eos", False)):
        token = _token_id(metadata, name, len(vocabulary.tokens))
        if token is not None and metadata.flag(f"{KEY}add_{name}_token", default):
            named[name] = token, vocabulary.tokens[token]
    if not named:
        return None

    def around(sequence: str, kind: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": sequence, "type_id": kind}}
        special = {
            name: {"SpecialToken": {"id": token, "type_id": kind}}
            for name, (_, token) in named.items()
        }
        return [each for each in (special.get("bos"), text, special.get("eos")) if each]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [index], "tokens": [token]}
            for index, token in named.values()
        },
    }


def check_vocabulary(metadata: Metadata, rows: int) -> None:
    """Raises TokenizerError if the model has embeddings for fewer tokens than there are."""
    count = len(metadata.texts(f"{KEY}tokens"))
    if count > rows:
        raise TokenizerError(
            f"{metadata.path}: {KEY}tokens has {count} tokens, and the model has {rows} embeddings"
        )
