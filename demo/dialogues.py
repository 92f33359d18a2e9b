"""The training text of the demo model: dialogues and plain texts, made from templates.

The same seed gives the same text. Prompts that belong to the evaluation never occur in it. All of
it was written for this project; nothing is taken from elsewhere.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass

from exercises import counting, lists, repeating, spelling, sums
from facts import animals, calendar, world
from knowledge import Knowledge, topics, unknown
from stories import make_story, stories, verse
from turns import Source, Turn, casual, is_held_out, load

_PROJECT = Knowledge(tuple(topics("headrace")))
_TALK = Knowledge(tuple(topics("talk")), follow_up=False)
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are the demo model of Headrace.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "You are a helpful AI assistant. Answer the questions of the user.",
)
_NAMES: list[str] = load("facts")["words"]["names"]
_PLACES: list[str] = load("facts")["words"]["cities"]
_FOODS: list[str] = load("facts")["words"]["foods"]
_COLOURS: list[str] = load("facts")["words"]["colours"]

# Source and its share of the turns.
SOURCES: dict[str, tuple[Source, float]] = {
    "project": (_PROJECT, 18),
    "talk": (_TALK, 12),
    "sums": (sums, 20),
    "counting": (counting, 5),
    "lists": (lists, 12),
    "spelling": (spelling, 8),
    "repeating": (repeating, 6),
    "calendar": (calendar, 5),
    "world": (world, 7),
    "animals": (animals, 5),
    "unknown": (unknown, 6),
    "stories": (stories, 4),
    "verse": (verse, 2),
}
# Prompts of these sources are held out by their hash; the other sources hold out whole phrasings.
_HASHED = frozenset(SOURCES) - {"project", "talk"}
_LONG, _PLAIN, _REMEMBER, _SYSTEM = 0.01, 0.05, 0.06, 0.15


@dataclass(frozen=True)
class Dialogue:
    """Turns after an optional system message; or, without turns, a plain text."""

    turns: tuple[Turn, ...]
    system: str = ""
    text: str = ""


@dataclass(frozen=True)
class Probe:
    """A prompt that was held out of the training text, with every reply that is right."""

    kind: str
    prompt: str
    accepted: frozenset[str]


def generate(count: int, seed: int) -> Iterator[Dialogue]:
    """`count` dialogues for training."""
    rng = random.Random(seed)
    for _ in range(count):
        yield _plain(rng) if rng.random() < _PLAIN else _dialogue(rng)


def _dialogue(rng: random.Random) -> Dialogue:
    system = rng.choice(_SYSTEMS) if rng.random() < _SYSTEM else ""
    length = rng.randint(12, 36) if rng.random() < _LONG else rng.choice((1, 1, 1, 2, 2, 3, 4))
    turns = [turn for _ in range(length) for turn in _chunk(rng)]
    if rng.random() < _REMEMBER:
        turns = _remember(rng, turns)
    return Dialogue(tuple(turns), system)


def _chunk(rng: random.Random) -> list[Turn]:
    names = list(SOURCES)
    while True:
        (name,) = rng.choices(names, [share for _, share in SOURCES.values()])
        turns = SOURCES[name][0](rng)
        if name not in _HASHED or not any(is_held_out(turn.prompt) for turn in turns):
            return turns


def _remember(rng: random.Random, turns: list[Turn]) -> list[Turn]:
    """The turns between something that the user tells and a question about it."""
    name, colour = rng.choice(_NAMES), rng.choice(_COLOURS)
    food, city = rng.choice(_FOODS), rng.choice(_PLACES)
    told, reply, ask, answer = rng.choice(
        (
            (
                rng.choice(
                    (
                        "My name is {}.",
                        "I am {}.",
                        "Hi, I'm {}.",
                        "Hello, my name is {}!",
                        "Call me {}.",
                    )
                ).format(name),
                f"Nice to meet you, {name}! How can I help you?",
                rng.choice(
                    ("What is my name?", "What's my name?", "Who am I?", "Do you remember my name?")
                ),
                f"Your name is {name}.",
            ),
            (
                f"My favourite colour is {colour}.",
                f"{colour.capitalize()} is a nice colour.",
                rng.choice(("What is my favourite colour?", "Which colour do I like?")),
                f"Your favourite colour is {colour}.",
            ),
            (
                f"I like {food}.",
                f"I can not eat, but {food} must be good.",
                "What do I like?",
                f"You like {food}.",
            ),
            (
                f"I live in {city}.",
                f"{city} is a nice city.",
                "Where do I live?",
                f"You live in {city}.",
            ),
        )
    )
    kept = turns if rng.random() < 0.6 else []
    return [Turn(told, reply), *kept, Turn(casual(rng, ask), answer)]


def _plain(rng: random.Random) -> Dialogue:
    """A text without roles, so that plain completions read well too."""
    if rng.random() < 0.5:
        return Dialogue((), text=make_story(rng).text)
    if rng.random() < 0.4:
        return Dialogue((), text=" ".join(rng.choice(_PROJECT.topics).answers))
    turns = _chunk(rng)
    return Dialogue((), text="\n".join(f"Q: {turn.prompt}\nA: {turn.reply}" for turn in turns))


def probes(per_kind: int, seed: int) -> list[Probe]:
    """Held-out prompts of every kind that has a right answer."""
    rng = random.Random(seed)
    found: list[Probe] = []
    for kind, source in (("project", _PROJECT), ("talk", _TALK)):
        held_out = [
            Probe(kind, prompt, frozenset(topic.answers))
            for topic in source.topics
            for prompt in topic.held_out
        ]
        found += rng.sample(held_out, min(per_kind, len(held_out)))
    for kind in sorted(_HASHED - {"stories", "verse"}):
        found += _hashed_probes(rng, kind, per_kind)
    return found


def _hashed_probes(rng: random.Random, kind: str, count: int) -> list[Probe]:
    source, _ = SOURCES[kind]
    found: dict[str, Probe] = {}
    while len(found) < count:
        prompt, reply = source(rng)[0]
        if is_held_out(prompt):
            accepted = (
                frozenset(load("unknown")["answers"]) if kind == "unknown" else frozenset({reply})
            )
            found[prompt] = Probe(kind, prompt, accepted)
    return list(found.values())


def main() -> None:
    """Print some dialogues, to look at."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for dialogue in generate(arguments.count, arguments.seed):
        print("-" * 60, dialogue.system or dialogue.text, sep="\n")
        for turn in dialogue.turns:
            print(f"> {turn.prompt}\n{turn.reply}")


if __name__ == "__main__":
    main()
