"""The demo model's tokenizer, and dialogues as its token ids.

`python demo/tokens.py` trains the tokenizer and writes `tokenizer.json` to this folder. A word has
the same tokens with and without a space before it, or is a single token together with the space. So
the model can copy words that it has never seen.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dialogues import Dialogue, generate
from tools import signature
from turns import Turn

FILE = Path(__file__).parent / "tokenizer.json"
VOCABULARY = 2048
CONTEXT = 2048
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
IGNORED = -100  # label of a position without loss
_DIALOGUES, _SEED = 30_000, "tokenizer"
_SPACED_WORDS = 600  # number of words that are a single token with the space before them
_SPACE = "Ġ"  # the byte-level form of a space
_OTHER_PIECES = r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Single digits, punctuation and line ends as in Qwen2's tokenizer.
_PIECES = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?\p{{L}}+|{_OTHER_PIECES}"
_SPACELESS = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|\p{{L}}+|{_OTHER_PIECES}"


@dataclass(frozen=True)
class Example:
    """Token ids of one text; `labels[i]` is the token to predict at `i`, or IGNORED."""

    ids: list[int]
    labels: list[int]


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE tokenizer: every UTF-8 text can be encoded."""
    seen = list(texts)
    first = _tokenizer(models.BPE(), _SPACELESS)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(_MARKS) - _SPACED_WORDS,
        initial_alphabet=alphabet,
        special_tokens=[AddedToken(token, special=True) for token in (END_OF_TEXT, START, END)],
        show_progress=False,
    )
    first.train_from_iterator(seen, trainer)
    model = json.loads(first.to_str())["model"]
    vocabulary, merges = model["vocab"], [tuple(merge) for merge in model["merges"]]
    for mark in _MARKS:
        vocabulary[mark] = len(vocabulary)
    for word in _spaced_words(seen, vocabulary):
        vocabulary[_SPACE + word] = len(vocabulary)
        merges.append((_SPACE, word))
    whole = _tokenizer(models.BPE(vocabulary, merges), _PIECES)
    whole.add_special_tokens(
        [AddedToken(token, special=True) for token in (END_OF_TEXT, START, END)]
    )
    whole.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in _MARKS])
    assert whole.get_vocab_size() == VOCABULARY
    return whole


def _tokenizer(model: models.BPE, pieces: str) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _spaced_words(texts: Iterable[str], vocabulary: dict[str, int]) -> list[str]:
    """The words of one token that most often follow a space."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split(" ")[1:])
    words: Counter[str] = Counter()
    for word, count in counts.items():
        bare = word.rstrip(".,?!:;")
        if bare.isalpha() and bare in vocabulary:
            words[bare] += count
    chosen = sorted(words, key=lambda word: (-words[word], word))[:_SPACED_WORDS]
    assert len(chosen) == _SPACED_WORDS
    return chosen


def texts_of(dialogue: Dialogue) -> Iterator[str]:
    """Every text of a dialogue, for the training of the tokenizer."""
    yield from (dialogue.text, "system\n" + "\n".join(instructions(dialogue)))
    for turn in dialogue.turns:
        yield from (f"{turn.role}\n{turn.prompt}", turn.reasoning, f"assistant\n{turn.reply}")


def instructions(dialogue: Dialogue) -> Iterator[str]:
    """The lines of the system message."""
    if dialogue.system:
        yield dialogue.system
    if dialogue.effort:
        yield f"Reasoning: {dialogue.effort}"
    if dialogue.tools:
        yield "Tools:"
    yield from map(signature, dialogue.tools)


def encode(tokenizer: Tokenizer, dialogue: Dialogue) -> Example:
    """The dialogue in the chat template's form, with loss only on the model's replies."""
    text = _Text()
    if dialogue.text:
        text.add(dialogue.text + END_OF_TEXT, learned=True)
    system = "\n".join(instructions(dialogue))
    if system:
        text.add(f"{START}system\n{system}{END}\n")
    for at, turn in enumerate(dialogue.turns):
        text.add(f"{START}{turn.role}\n{turn.prompt}{END}\n")
        if not turn.reply:
            continue
        text.add(f"{START}assistant\n")
        last = at == len(dialogue.turns) - 1
        if dialogue.effort and last:
            text.add("<think>\n")
            text.add(f"{turn.reasoning}\n</think>\n\n", learned=True)
        text.add_reply(turn, learned=last or not dialogue.effort)
        text.add("\n")
    return text.example(tokenizer)


class _Text:
    """A text that grows, with the spans that the model is trained on."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self._learned: list[tuple[int, int]] = []
        self._given: list[tuple[int, int]] = []

    def add(self, text: str, *, learned: bool = False) -> None:
        if learned:
            self._learned.append((self._length, self._length + len(text)))
        self._parts.append(text)
        self._length += len(text)

    def add_reply(self, turn: Turn, *, learned: bool) -> None:
        self._given += [(self._length + first, self._length + last) for first, last in turn.given]
        self.add(turn.reply + END, learned=learned)

    def example(self, tokenizer: Tokenizer) -> Example:
        encoding = tokenizer.encode("".join(self._parts), add_special_tokens=False)
        ids: list[int] = encoding.ids
        labels = [IGNORED] * len(ids)
        at, offsets = 0, encoding.offsets
        for first, last in self._learned:
            while at < len(ids) and offsets[at][0] < first:
                at += 1
            while at < len(ids) and offsets[at][0] < last:
                labels[at] = ids[at]
                at += 1
        for first, last in self._given:
            for at, (begin, end) in enumerate(offsets):
                if begin < last and first < end:
                    labels[at] = IGNORED
        return Example(ids[: CONTEXT - 1], [*labels[1:], IGNORED][: CONTEXT - 1])


def main() -> None:
    """Train the tokenizer."""
    sources = generate(_DIALOGUES, _SEED)
    tokenizer = train_tokenizer(text for each in sources for text in texts_of(each) if text)
    tokenizer.save(str(FILE), pretty=False)


if __name__ == "__main__":
    main()
