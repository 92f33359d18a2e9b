"""What the text generators share: turns, sources of turns, and the ways in which people write.

All randomness comes from the generator passed in, so the same seed gives the same text.
"""

import random
import tomllib
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TEXT = Path(__file__).parent / "text"
HELD_OUT_SHARE = 40  # one prompt of this number is kept out of the training text

_ONSETS = (*"bcdfghjklmnprstvwz", *"br ch cl dr fl gr kn pl qu sh sl sp st th tr".split(), "")
_VOWELS = (*"aeiouaeiouy", *"ai ea ee ie oo ou".split())
_CODAS = ("", "", "", *"ck d ff k l ll m n n nd ng r r s st t x".split())
_ACCENTED, _OTHER_SCRIPTS = "äöüéèáíóñåøçßłőë", "東京大阪山川北海абвгдеиклмнор"
_BEFORE = (
    "Quick question: ",
    "I would like to know: ",
    "Can you tell me ",
    "Sorry, ",
    "Well, ",
    "So ",
    "Now ",
    "I wonder: ",
    "Dear model, ",
    "Excuse me, ",
)
_AFTER = (
    " Please.",
    " Thanks!",
    " Please tell me.",
    " Thank you.",
    " :)",
    "!!",
    " I am curious.",
    "..",
)
_OPENERS = ("Please: ", "Hi! ", "Hello! ", "Hey, ", "OK. ", "Next question: ", "Tell me: ", "And ")


class Turn(NamedTuple):
    """A message of the user or of a tool, and the model's answer.

    `reasoning` is what the model thinks before the answer. `given` are the spans of `reply`, each
    as (begin, end) in characters, that a grammar writes. The model is not trained on them.
    """

    prompt: str
    reply: str
    role: str = "user"
    reasoning: str = ""
    given: tuple[tuple[int, int], ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The message, and the model's answer if there is one."""
        asked = {"role": self.role, "content": self.prompt}
        return [asked, {"role": "assistant", "content": self.reply}] if self.reply else [asked]


class Argument(NamedTuple):
    """An argument of a tool. `kind` is a JSON type, or values with `|` between them."""

    name: str
    kind: str = "string"
    required: bool = True


class Tool(NamedTuple):
    """A function that the model may call."""

    name: str
    description: str
    arguments: tuple[Argument, ...]


Source = Callable[[random.Random], list[Turn]]


def load(name: str) -> dict[str, Any]:
    """The table `text/NAME.toml`."""
    return tomllib.loads((TEXT / f"{name}.toml").read_text(encoding="utf-8"))


def is_held_out(prompt: str) -> bool:
    """Whether a generated prompt belongs to the evaluation and never to the training text."""
    return zlib.crc32(prompt.lower().encode()) % HELD_OUT_SHARE == 0


def casual(rng: random.Random, prompt: str) -> str:
    """The prompt as a person may type it in a hurry: an opener, no full stop, no capitals."""
    if rng.random() < 0.12:
        prompt = rng.choice(_OPENERS) + prompt
    if rng.random() < 0.3 and prompt[-1] in "?.!":
        prompt = prompt[:-1]
    elif rng.random() < 0.03:
        prompt += rng.choice("?!")
    if rng.random() < 0.2:
        prompt = prompt.lower()
    return prompt


def invented(rng: random.Random, syllables: int = 0) -> str:
    """A word that does not exist, in small letters."""
    count = syllables or rng.choice((1, 2, 2, 2, 3, 3, 4))
    word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count))
    kind = rng.random()
    if kind < 0.01:
        return "".join(rng.choice(_OTHER_SCRIPTS) for _ in range(rng.randint(2, 5)))
    if kind < 0.04:
        at = rng.randrange(len(word))
        return word[:at] + rng.choice(_ACCENTED) + word[at + 1 :]
    return word + rng.choice(_CODAS)


def code(rng: random.Random) -> str:
    """Letters and digits as in an id."""
    letters = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(1, 4)))
    digits = str(rng.randint(0, 10 ** rng.randint(1, 5)))
    return rng.choice(
        (letters + digits, f"{letters.upper()}-{digits}", digits + letters, f"{letters}_{digits}")
    )


def noisy(rng: random.Random, prompt: str) -> str:
    """The prompt without a word or letter, with two letters exchanged, or with polite words."""
    words = prompt.split(" ")
    at = rng.randrange(len(words))
    kind = rng.random()
    if kind < 0.2 and len(words) > 3:
        return " ".join(words[:at] + words[at + 1 :])
    if kind < 0.5 and len(words[at]) > 3:
        place = rng.randrange(1, len(words[at]) - 1)
        word = words[at]
        kept = word[place + 1] + (word[place] if kind < 0.35 else "")
        changed = word[:place] + kept + word[place + 2 :]
        return " ".join([*words[:at], changed, *words[at + 1 :]])
    if kind < 0.75:
        return rng.choice(_BEFORE) + prompt[:1].lower() + prompt[1:]
    return prompt + rng.choice(_AFTER)


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
