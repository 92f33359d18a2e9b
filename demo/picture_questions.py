"""Questions about the pictures of `drawings.py`, with their answers."""

import random
from collections.abc import Callable

from drawings import COLOURS, COUNTS, KINDS, Group, Picture, named
from turns import Turn, capital, casual, invented

NO_PICTURE = "Please show me a picture of coloured shapes or of a number."
DESCRIBE = (
    "",
    "What do you see?",
    "What is this?",
    "What is in the picture?",
    "What is in this picture?",
    "What is in this image?",
    "What does the image show?",
    "Describe the picture.",
    "Describe this image.",
    "What can you see in this picture?",
    "What shapes are there?",
    "Which shapes do you see?",
    "Which number is this?",
    "What number is this?",
    "Read the number.",
)
_WORDS = (
    "hello hi what is your name how are you tell me a story count to ten the circles square red"
    " blue picture image number where who why can you see please draw shapes colour thanks good"
).split()

Question = Callable[[random.Random, Picture], Turn | None]


def ask(rng: random.Random, picture: Picture) -> Turn:
    """A question about the picture, and its answer."""
    turn = None
    while turn is None:
        turn = rng.choice(_OF_SHAPES if picture.groups else _OF_NUMBERS)(rng, picture)
    return turn._replace(prompt=casual(rng, turn.prompt) if turn.prompt else "")


def ask_nothing(rng: random.Random) -> Turn:
    """What a person may write who has shown no picture."""
    words = rng.choices((*_WORDS, invented(rng)), k=rng.randint(1, 8))
    prompt = capital(" ".join(words)) + rng.choice("?.! ").strip()
    if rng.random() < 0.4:
        prompt = rng.choice(DESCRIBE[1:])
    return Turn(casual(rng, prompt), NO_PICTURE)


def describe(rng: random.Random, picture: Picture) -> Turn:
    """Asks for all that is in the picture."""
    return Turn(rng.choice(DESCRIBE), f"I see {picture}.")


def _count_kind(rng: random.Random, picture: Picture) -> Turn:
    kind = rng.choice([group.kind for group in picture.groups] + [rng.choice(KINDS)])
    count = sum(group.count for group in picture.groups if group.kind == kind)
    asked = rng.choice(("How many {} are there?", "How many {} do you see?", "Count the {}."))
    return Turn(asked.format(f"{kind}s"), _there(count, named(kind, count)))


def _count_all(rng: random.Random, picture: Picture) -> Turn:
    count = sum(group.count for group in picture.groups)
    asked = rng.choice(("How many shapes are there?", "How many shapes do you see?"))
    return Turn(asked, _there(count, named("shape", count)))


def _there(count: int, name: str) -> str:
    return f"There {'is' if count == 1 else 'are'} {COUNTS[count]} {name}."


def _colour(rng: random.Random, picture: Picture) -> Turn | None:
    kinds = [group.kind for group in picture.groups]
    alone = [group for group in picture.groups if kinds.count(group.kind) == 1]
    if not alone:
        return None
    group = rng.choice(alone)
    verb, name = ("is" if group.count == 1 else "are"), named(group.kind, group.count)
    word = rng.choice(("colour", "color"))
    asked = rng.choice((f"What {word} {verb} the {name}?", f"Which {word} {verb} the {name}?"))
    return Turn(asked, f"The {name} {verb} {group.colour}.")


def _is_there(rng: random.Random, picture: Picture) -> Turn:
    drawn = rng.choice(picture.groups)
    if rng.random() < 0.5:
        drawn = Group(1, rng.choice(list(COLOURS)), rng.choice([drawn.kind, rng.choice(KINDS)]))
    found = [g for g in picture.groups if (g.colour, g.kind) == (drawn.colour, drawn.kind)]
    asked = f"Is there a {drawn.colour} {drawn.kind}?"
    if not found:
        return Turn(asked, f"No, I see no {drawn.colour} {drawn.kind}.")
    return Turn(asked, f"Yes, I see {found[0]}.")


def _digits(rng: random.Random, picture: Picture) -> Turn:
    count = len(picture.digits)
    asked = rng.choice(("How many digits are there?", "How many digits does it have?"))
    return Turn(asked, _there(count, named("digit", count)))


def _one_digit(rng: random.Random, picture: Picture) -> Turn:
    at = rng.choice((0, -1))
    name = "last" if at else "first"
    return Turn(f"What is the {name} digit?", f"The {name} digit is {picture.digits[at]}.")


_OF_SHAPES: tuple[Question, ...] = (
    describe,
    describe,
    describe,
    _count_kind,
    _count_all,
    _colour,
    _is_there,
)
_OF_NUMBERS: tuple[Question, ...] = (describe, describe, describe, describe, _digits, _one_digit)
