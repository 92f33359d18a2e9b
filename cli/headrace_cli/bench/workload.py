"""The requests of a load: prompts and lengths, all drawn from one seed.

Every source is an iterator that makes a request when it is asked for one.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol, TypeVar

MAX_REQUESTS = 1_000_000
# Ids below this are often special tokens.
FIRST_TOKEN_ID = 10
# Common words, most of them one token of any tokenizer that was trained on English.
WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or "
    "one had by word but not what all were we when your can said there use an each which she do "
    "how their if will up other about out many then them these so some her would make like him "
    "into time has look two more write go see number no way could people my than first water been "
    "call who oil its now find long down day did get come made may part"
).split()

Messages = tuple[Mapping[str, object], ...]
Prompt = str | tuple[int, ...] | Messages


Begun = TypeVar("Begun", tuple[int, ...], Messages)


class Lengths(Protocol):
    """A distribution of whole numbers from 1."""

    def draw(self, rng: random.Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Range:
    """Whole numbers from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Normal:
    """Whole numbers around `mean`, with the standard deviation `deviation`, and at least 1."""

    mean: float
    deviation: float

    def draw(self, rng: random.Random) -> int:
        return max(1, round(rng.gauss(self.mean, self.deviation)))


def parse_lengths(text: str) -> Range | Normal:
    """Reads `128`, `16-512`, or `256,64` (mean and deviation). Raises ValueError otherwise."""
    try:
        if "," in text:
            mean, _, deviation = text.partition(",")
            normal = Normal(float(mean), float(deviation))
            if 1 <= normal.mean < float("inf") and 0 <= normal.deviation < float("inf"):
                return normal
        else:
            low, _, high = text.partition("-")
            bounds = Range(int(low), int(high or low))
            if 1 <= bounds.low <= bounds.high:
                return bounds
    except ValueError:
        pass
    raise ValueError(f"must be N, LOW-HIGH or MEAN,DEVIATION, from 1, not {text!r}")


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a text, token ids or chat messages, and how many tokens to generate."""

    prompt: Prompt
    output_tokens: int

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, tuple) and isinstance(self.prompt[0], Mapping)

    def payload(self, model: str, extra: Mapping[str, object]) -> dict[str, object]:
        """The request's body without the fields in `extra`, which all requests share."""
        prompt = "messages" if self.is_chat else "prompt"
        return {
            "model": model,
            prompt: self.prompt,
            "max_tokens": self.output_tokens,
            **extra,
        }

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The lengths of one request in tokens."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Prefixes:
    """`count` beginnings of `tokens` tokens; each request has one, before its own prompt."""

    count: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Words:
    """Makes chats of random words. A message of n words has about `fixed` + n * `per_word` tokens.

    A shared beginning is a system message.
    """

    per_word: float = 1.0
    fixed: float = 0.0

    def prefix(self, rng: random.Random, tokens: int) -> Messages:
        return ({"role": "system", "content": self._text(rng, tokens - self.fixed)},)

    def prompt(self, rng: random.Random, tokens: int, prefix: Messages) -> Messages:
        fixed = 0.0 if prefix else self.fixed
        return (*prefix, {"role": "user", "content": self._text(rng, tokens - fixed)})

    def _text(self, rng: random.Random, tokens: float) -> str:
        return " ".join(rng.choices(WORDS, k=max(1, round(tokens / self.per_word))))


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Makes prompts of random token ids, so that lengths are exact. Raises ValueError if too few.

    A shared beginning is the first ids.
    """

    vocab_size: int

    def __post_init__(self) -> None:
        if self.vocab_size <= FIRST_TOKEN_ID:
            raise ValueError(f"vocab size: must be over {FIRST_TOKEN_ID}, not {self.vocab_size}")

    def prefix(self, rng: random.Random, tokens: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(FIRST_TOKEN_ID, self.vocab_size), k=tokens))

    def prompt(self, rng: random.Random, tokens: int, prefix: tuple[int, ...]) -> tuple[int, ...]:
        return prefix + self.prefix(rng, tokens)


def drawn_sizes(prompts: Lengths, outputs: Lengths, *, seed: int) -> Iterator[Sizes]:
    """Endless random sizes."""
    rng = random.Random(f"{seed} sizes")
    while True:
        yield Sizes(prompts.draw(rng), outputs.draw(rng))


class Maker(Protocol[Begun]):
    """Makes prompts of given lengths, and beginnings that they share."""

    def prefix(self, rng: random.Random, tokens: int) -> Begun: ...

    def prompt(self, rng: random.Random, tokens: int, prefix: Begun | tuple[()]) -> Begun: ...


def synthetic_jobs(
    maker: Maker[Begun], sizes: Iterable[Sizes], prefixes: Prefixes | None = None, *, seed: int
) -> Iterator[Job]:
    """A request for each of `sizes`. Without prefixes, no two prompts have the same beginning."""
    rng = random.Random(f"{seed} prompts")
    beginnings: list[Begun | tuple[()]] = [()]
    if prefixes is not None:
        beginnings = [
            maker.prefix(random.Random(f"{seed} prefix {number}"), prefixes.tokens)
            for number in range(prefixes.count)
        ]
    for each in sizes:
        yield Job(maker.prompt(rng, each.prompt, rng.choice(beginnings)), each.output)


def dataset_jobs(path: Path, outputs: Lengths, *, chat: bool | None, seed: int) -> Iterator[Job]:
    """The requests of a file in random order, from its beginning again when it ends.

    The file holds JSON objects, one a line or in one array. An object has `prompt` (a text or token
    ids), `messages`, or `conversations` as in ShareGPT (the first turn is asked), and maybe
    `output_tokens`. With `chat` true, texts become messages. Raises ValueError naming the line that
    cannot be used.
    """
    rng = random.Random(seed)
    rows = [_row(row, where, chat) for row, where in _objects(path)]
    if not rows:
        raise ValueError(f"{path}: has no prompts")
    rng.shuffle(rows)
    return (Job(prompt, length or outputs.draw(rng)) for prompt, length in cycle(rows))


def _objects(path: Path) -> Iterator[tuple[Any, str]]:
    """The objects of a file, and where each one is."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not text in UTF-8") from None
    if text.lstrip().startswith("["):
        whole = _parsed(text, str(path))
        yield from ((row, f"{path}: entry {number}") for number, row in enumerate(whole, 1))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _parsed(line, f"{path}:{number}"), f"{path}:{number}"


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from None


def _row(row: Any, where: str, chat: bool | None) -> tuple[Prompt, int | None]:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not a JSON object")
    length = row.get("output_tokens")
    if length is not None and (not isinstance(length, int) or length < 1):
        raise ValueError(f"{where}: output_tokens must be a number over 0")
    prompt = _prompt(row)
    if prompt is None:
        raise ValueError(
            f"{where}: needs `prompt` (text or token ids), `messages` or `conversations`"
        )
    if chat and isinstance(prompt, str):
        prompt = ({"role": "user", "content": prompt},)
    job = Job(prompt, 1)
    if chat is not None and job.is_chat is not chat:
        kind = "token ids" if chat else "messages"
        raise ValueError(f"{where}: {kind} cannot be sent as a {'chat' if chat else 'completion'}")
    return prompt, length


def _prompt(row: Mapping[str, Any]) -> Prompt | None:
    prompt = row.get("prompt", row.get("messages"))
    if prompt is None and row.get("conversations"):
        first = row["conversations"][0]
        prompt = first.get("value") if isinstance(first, Mapping) else None
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt:
        return tuple(prompt)
    return None
