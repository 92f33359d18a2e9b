"""The small vocabulary of the text generators: a turn, a source of turns, how people phrase things.

All randomness comes from the generator passed in, so the same seed gives the same text.
"""

import random
import tomllib
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TEXT = Path(__file__).parent / "text"
HELD_OUT_SHARE = 40  # one prompt in so many is kept out of the training text

_OPENERS = ("Please: ", "Hi! ", "Hello! ", "Hey, ", "OK. ", "Next question: ", "Tell me: ", "And ")


class Turn(NamedTuple):
    """A message of the user and the model's answer."""

    prompt: str
    reply: str


Source = Callable[[random.Random], list[Turn]]


def load(name: str) -> dict[str, Any]:
    """The table `text/NAME.toml`."""
    return tomllib.loads((TEXT / f"{name}.toml").read_text(encoding="utf-8"))


def is_held_out(prompt: str) -> bool:
    """Whether a generated prompt belongs to the evaluation and never to the training text."""
    return zlib.crc32(prompt.lower().encode()) % HELD_OUT_SHARE == 0


def casual(rng: random.Random, prompt: str) -> str:
    """The prompt as a person in a hurry types it: an opener, no full stop, no capitals."""
    if rng.random() < 0.12:
        prompt = rng.choice(_OPENERS) + prompt
    if rng.random() < 0.3 and prompt[-1] in "?.!":
        prompt = prompt[:-1]
    elif rng.random() < 0.03:
        prompt += rng.choice("?!")
    if rng.random() < 0.2:
        prompt = prompt.lower()
    return prompt


def listed(items: Sequence[object]) -> str:
    """`a, b, c`."""
    return ", ".join(str(item) for item in items)


def spoken(items: Sequence[object]) -> str:
    """`a, b and c`."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def capital(text: str) -> str:
    """The text with a capital first letter, the rest untouched."""
    return text[:1].upper() + text[1:]


def article(noun: str) -> str:
    """The noun with `a` or `an`."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
