"""The requests of a load benchmark: prompts, lengths and arrival times, all from one seed."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

MAX_REQUESTS = 1_000_000
# Below these, vocabularies keep their special tokens.
FIRST_TOKEN_ID = 10

Prompt = str | tuple[int, ...] | tuple[Mapping[str, object], ...]


@dataclass(frozen=True, slots=True)
class Range:
    """Whole numbers from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Range":
        """`128` or `16-512`. Raises ValueError otherwise."""
        low, _, high = text.partition("-")
        try:
            parsed = cls(int(low), int(high or low))
        except ValueError:
            raise ValueError(f"must be N or LOW-HIGH, not {text!r}") from None
        if not 1 <= parsed.low <= parsed.high:
            raise ValueError(f"must have 1 <= LOW <= HIGH, not {text!r}")
        return parsed

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


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


def random_jobs(
    count: int, prompt_tokens: Range, output_tokens: Range, *, vocab_size: int, seed: int
) -> list[Job]:
    """Prompts of random token ids, so that no two share a prefix and lengths are exact."""
    rng = random.Random(seed)
    if vocab_size <= FIRST_TOKEN_ID:
        raise ValueError(f"vocab size: must be over {FIRST_TOKEN_ID}, not {vocab_size}")
    return [
        Job(
            tuple(
                rng.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(prompt_tokens.draw(rng))
            ),
            output_tokens.draw(rng),
        )
        for _ in range(count)
    ]


def dataset_jobs(path: Path, count: int, output_tokens: Range, *, seed: int) -> list[Job]:
    """`count` lines of a JSONL file in random order, from its beginning again when it ends.

    A line holds `prompt` (text or token ids) or `messages`, and maybe `output_tokens`. Raises
    ValueError naming the line that does not.
    """
    rng = random.Random(seed)
    rows = [_row(line, f"{path}:{number}") for number, line in _lines(path)]
    if not rows:
        raise ValueError(f"{path}: has no prompts")
    rng.shuffle(rows)
    return [
        Job(prompt, length or output_tokens.draw(rng))
        for prompt, length in islice(cycle(rows), count)
    ]


def arrivals(rng: random.Random, count: int, rate: float) -> Iterator[float]:
    """Seconds from the start at which requests arrive: a Poisson process of `rate` a second.

    At an infinite rate all arrive at 0 and nothing is drawn.
    """
    at = 0.0
    for _ in range(count):
        if rate != float("inf"):
            at += rng.expovariate(rate)
        yield at


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _row(line: str, where: str) -> tuple[Prompt, int | None]:
    try:
        row = json.loads(line)
        prompt = row.get("prompt", row.get("messages"))
        length = row.get("output_tokens")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{where}: not a JSON object ({error})") from None
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt:
        prompt = tuple(prompt)
    elif not isinstance(prompt, str) or not prompt:
        raise ValueError(f"{where}: needs `prompt` (text or token ids) or `messages`")
    if length is not None and (not isinstance(length, int) or length < 1):
        raise ValueError(f"{where}: output_tokens must be a number over 0")
    return prompt, length
