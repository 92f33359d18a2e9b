"""The training text of the demo model: dialogues and plain texts, made from templates.

The same seed gives the same text. Prompts that belong to the evaluation never occur in it. All of
it was written for this project; nothing is taken from elsewhere.
"""

import argparse
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from exercises import counting, lists, repeating, spelling, sums
from facts import animals, calendar, world
from knowledge import Knowledge, topics, unknown
from passages import about_passage
from reasoning import HIGH, LOW, about_json, about_tool, reasoned, recalled
from schemas import answer_in_json, is_told
from stories import make_story, stories, verse
from tools import (
    CALCULATOR,
    LOOKUP,
    a_calculator,
    a_lookup,
    city,
    invented_topic,
    name,
    strange_sentence,
    use,
)
from turns import Source, Tool, Turn, casual, code, invented, is_held_out, load

_PROJECT = Knowledge(tuple(topics("headrace")))
_TALK = Knowledge(tuple(topics("talk")), follow_up=False)
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are the demo model of Headrace.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "You are a helpful AI assistant. Answer the questions of the user.",
)
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
    """Turns after an optional system message; or, without turns, a plain text.

    With an `effort` the model thinks before its last answer, and is trained on that answer only.
    """

    turns: tuple[Turn, ...]
    system: str = ""
    text: str = ""
    tools: tuple[Tool, ...] = ()
    effort: str = ""


@dataclass(frozen=True)
class Probe:
    """A prompt that was held out of the training text, with every reply that is right."""

    kind: str
    prompt: str
    accepted: frozenset[str]


def generate(count: int, seed: int | str) -> Iterator[Dialogue]:
    """`count` dialogues for training."""
    rng = random.Random(seed)
    for _ in range(count):
        yield draw(rng)


def draw(rng: random.Random) -> Dialogue:
    """One dialogue for training."""
    while True:
        (kind,) = rng.choices(_KINDS, _SHARES)
        dialogue = kind(rng)
        if kind in (_dialogue, _plain) or not any(map(_is_kept, dialogue.turns)):
            return dialogue


def _is_kept(turn: Turn) -> bool:
    return turn.role == "user" and is_held_out(turn.prompt)


def _with_tools(rng: random.Random) -> Dialogue:
    uses = [use(rng) for _ in range(2 if rng.random() < 0.12 else 1)]
    if len(uses) > 1 and uses[0].purpose == uses[1].purpose:
        uses = uses[:1]
    tools = {used.purpose: used.tool for used in uses}
    if rng.random() < 0.45:
        tools.setdefault(CALCULATOR, a_calculator(rng))
    if rng.random() < 0.45:
        tools.setdefault(LOOKUP, a_lookup(rng))
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 3))):
        other = use(rng)
        tools.setdefault(other.purpose, other.tool)
    names = {used.tool.name for used in uses}
    used_tools = [used.tool for used in uses]
    shown = used_tools + [tool for tool in tools.values() if tool.name not in names]
    rng.shuffle(shown)
    system = rng.choice(_SYSTEMS) if rng.random() < 0.25 else ""
    if rng.random() < 0.12:
        turns = [turn for _ in range(rng.choice((1, 1, 2))) for turn in _beside_tools(rng, tools)]
        effort = rng.choice((LOW, HIGH)) if rng.random() < 0.2 else ""
        if effort:
            turns[-1] = recalled(turns[-1], effort)
        return Dialogue(tuple(turns), system, tools=tuple(shown), effort=effort)
    turns = _beside_tools(rng, tools) if rng.random() < 0.2 else []
    for used in uses[:-1]:
        turns += used.turns
    last = list(uses[-1].turns)
    effort = rng.choice((LOW, HIGH)) if rng.random() < 0.25 else ""
    if effort:
        last = last[:1] if rng.random() < 0.5 else last
        last[-1] = about_tool(last[-1], uses[-1].tool.name, effort)
    elif rng.random() < 0.15:
        last += _beside_tools(rng, tools)
    return Dialogue((*turns, *last), system, tools=tuple(shown), effort=effort)


def _beside_tools(rng: random.Random, purposes: Iterable[str]) -> list[Turn]:
    """Turns whose questions need no tool of these purposes."""
    shares = {"talk": 8, "project": 8, "counting": 2, "spelling": 2, "verse": 1, "animals": 2}
    if CALCULATOR not in purposes:
        shares["sums"] = 2
    if LOOKUP not in purposes:
        shares["unknown"] = 2
    (source,) = rng.choices(list(shares), list(shares.values()))
    return SOURCES[source][0](rng)[:1]


def _with_reasoning(rng: random.Random) -> Dialogue:
    effort = rng.choice((LOW, HIGH))
    turn = reasoned(rng, effort, lambda: _chunk(rng)[0])
    before = _chunk(rng) if rng.random() < 0.15 else []
    system = rng.choice(_SYSTEMS) if rng.random() < _SYSTEM else ""
    return Dialogue((*before, turn), system, effort=effort)


def _with_schema(rng: random.Random) -> Dialogue:
    system, turn = answer_in_json(rng)
    before = _chunk(rng) if rng.random() < 0.1 else []
    if rng.random() < _SYSTEM:
        system = f"{rng.choice(_SYSTEMS)} {system}".strip()
    effort = rng.choice((LOW, HIGH)) if rng.random() < 0.12 else ""
    if effort:
        turn = about_json(turn, effort)
    return Dialogue((*before, turn), system, effort=effort)


def _with_passage(rng: random.Random) -> Dialogue:
    system = rng.choice(_SYSTEMS) if rng.random() < _SYSTEM else ""
    return Dialogue((about_passage(rng, _PROJECT.topics),), system)


def _with_copy(rng: random.Random) -> Dialogue:
    """Invented words to repeat, or a table to look one up in. Calls and JSON need such copies."""
    if rng.random() < 0.5:
        text = rng.choice((strange_sentence, invented_topic, _strange_words))(rng)
        ask = rng.choice(
            ("Repeat: {}", "Say: {}", "Repeat after me: {}", "Please repeat: {}", 'Say "{}"')
        )
        return Dialogue((Turn(ask.format(text), text),))
    rows = {invented(rng): rng.choice((invented(rng), str(rng.randint(1, 9999))))
            for _ in range(rng.randint(2, 7))}  # fmt: skip
    key = rng.choice(list(rows))
    between = rng.choice((": ", " is ", " = ", " -> "))
    told = rng.choice((", ", "; ", "\n")).join(
        f"{key}{between}{value}" for key, value in rows.items()
    )
    ask = rng.choice(("What is {}?", "{}?", "Tell me {}.", "And {}?"))
    return Dialogue((Turn(f"{told}\n{ask.format(key)}", f"{key}{between}{rows[key]}"),))


def _strange_words(rng: random.Random) -> str:
    return " ".join(rng.choice((invented, invented, code))(rng) for _ in range(rng.randint(1, 6)))


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
    """`turns` between something that the user tells and a question about it."""
    called, colour = name(rng), rng.choice(_COLOURS)
    food, place = rng.choice(_FOODS), city(rng)
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
                ).format(called),
                f"Nice to meet you, {called}! How can I help you?",
                rng.choice(
                    ("What is my name?", "What's my name?", "Who am I?", "Do you remember my name?")
                ),
                f"Your name is {called}.",
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
                f"I live in {place}.",
                f"{place} is a nice city.",
                "Where do I live?",
                f"You live in {place}.",
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


# Kinds of dialogues and their shares.
_KINDS = (
    _dialogue, _plain, _with_tools, _with_reasoning, _with_schema, _with_passage, _with_copy
)  # fmt: skip
_SHARES = (38, 2, 26, 11, 15, 5, 3)


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
        turn = source(rng)[0]
        if is_held_out(turn.prompt):
            answers = load("unknown")["answers"] if kind == "unknown" else [turn.reply]
            found[turn.prompt] = Probe(kind, turn.prompt, frozenset(answers))
    return list(found.values())


def _call(rng: random.Random) -> Dialogue:
    dialogue = _used(rng)
    return replace(dialogue, turns=dialogue.turns[:1])


def _used(rng: random.Random) -> Dialogue:
    """One use of a tool without thoughts or other turns."""
    while True:
        dialogue = _with_tools(rng)
        roles = [turn.role for turn in dialogue.turns]
        if roles[:1] == ["user"] and set(roles[1:]) == {"tool"} and not dialogue.effort:
            return dialogue


def _json(rng: random.Random) -> Dialogue:
    """An answer in JSON, whose schema is in the prompt."""
    while True:
        dialogue = _with_schema(rng)
        if len(dialogue.turns) == 1 and not dialogue.effort and not dialogue.turns[0].given:
            return dialogue


def _values(rng: random.Random) -> Dialogue:
    """The data of a text in JSON, whose schema only the grammar has."""
    while True:
        dialogue = _with_schema(rng)
        if len(dialogue.turns) == 1 and not dialogue.effort and dialogue.turns[0].given:
            if is_told(dialogue.turns[0]):
                return dialogue


# The kinds of replies that are scored, with the function that makes their dialogues.
AGENT_KINDS: dict[str, Callable[[random.Random], Dialogue]] = {
    "calls": _call,
    "results": _used,
    "thoughts": _with_reasoning,
    "json": _json,
    "values": _values,
    "passages": _with_passage,
    "copies": _with_copy,
}


def agent_dialogues(kind: str, count: int, seed: int) -> list[Dialogue]:
    """Dialogues that were held out of the training text, whose last reply has to be right."""
    rng = random.Random(f"{kind} {seed}")
    found: list[Dialogue] = []
    while len(found) < count:
        dialogue = AGENT_KINDS[kind](rng)
        if any(map(_is_kept, dialogue.turns)):
            found.append(dialogue)
    return found


def main() -> None:
    """Print some dialogues."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for dialogue in generate(arguments.count, arguments.seed):
        print("-" * 60, dialogue.system or dialogue.text, *dialogue.tools, sep="\n")
        for turn in dialogue.turns:
            print(f"> {turn.prompt}\n{turn.reasoning and f'<{turn.reasoning}> '}{turn.reply}")


if __name__ == "__main__":
    main()
