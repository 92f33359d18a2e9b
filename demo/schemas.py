"""Answers in JSON: what a person asks for, and what a grammar leaves to the model.

A grammar writes names and signs itself. In half of the examples the question says nothing of JSON,
and only the values and the ends of values are learned: short ones.
"""

import json
import random
from collections.abc import Callable
from typing import Any

from turns import Turn, casual, load, spoken

_WORDS: dict[str, list[str]] = load("facts")["words"]
_UNKNOWN: list[str] = load("unknown")["topics"]
_TEXTS = {
    "name": "names",
    "city": "cities",
    "colour": "colours",
    "color": "colours",
    "animal": "animals",
    "food": "foods",
    "fruit": "fruits",
    "thing": "things",
    "title": "things",
    "item": "things",
    "word": "things",
    "kind": "animals",
    "place": "cities",
    "country": "cities",
    "author": "names",
    "answer": "things",
    "summary": "things",
    "description": "things",
    "text": "things",
    "river": "cities",
    "hero": "animals",
}
_NUMBERS = {
    "age": 90, "count": 20, "number": 99, "price": 50, "year": 2025, "wheels": 8, "size": 30,
    "legs": 8, "result": 99, "score": 10, "id": 99, "pages": 300, "weight": 90, "rating": 5,
}  # fmt: skip
_FLAGS = ("open", "happy", "free", "done", "ready", "is_true", "wet", "new")
_LISTS = {"tags": "things", "colours": "colours", "names": "names", "animals": "animals",
          "items": "things", "steps": "things", "words": "things", "cities": "cities"}  # fmt: skip
_NESTED = ("address", "owner", "details", "person", "data")
_WISHES = (
    "Give me JSON with {keys}.",
    "Answer as JSON with {keys}.",
    "Write JSON with {keys}.",
    "Return a JSON object with {keys}.",
    "Make up a {thing}. JSON with {keys}.",
    "I need {keys} as JSON.",
    "Describe a {thing} in JSON with {keys}.",
)
_VAGUE = (
    "Tell me about a {thing}.", "Make up a {thing}.", "Describe a {thing}.",
    "Tell me of a {thing}.", "Invent a {thing}.", "Give me a {thing}.", "What is a {thing}?",
    "A {thing}, please.",
    "Tell me about {topic}.", "Who is {name}?", "Describe {name}.", "Extract the data: {sentence}",
    "{sentence}", "Give me JSON.", "JSON, please.", "Write JSON.", "Answer in JSON.", "Hello!",
)  # fmt: skip


class _Writer:
    """JSON text on one line that knows which of its characters the model chooses."""

    def __init__(self) -> None:
        self.text = ""
        self.chosen: list[tuple[int, int]] = []

    def fixed(self, text: str) -> None:
        self.text += text

    def free(self, text: str) -> None:
        self.chosen.append((len(self.text), len(self.text) + len(text)))
        self.text += text


def answer_in_json(rng: random.Random, plain: Callable[[], Turn]) -> Turn:
    """A question with an answer in JSON."""
    if rng.random() < 0.2:
        return _sum_in_json(rng)
    told: dict[str, Any] = {}
    keys = _keys(rng)
    if rng.random() < 0.45:
        prompt = rng.choice(_WISHES).format(keys=spoken(keys), thing=_thing(rng))
        visible = True
    else:
        prompt = plain().prompt if rng.random() < 0.35 else _vague(rng, told)
        visible = False
    writer = _Writer()
    if not visible:
        keys = [*told, *(key for key in keys if key not in told)][: rng.randint(1, 5)]
    _object(rng, writer, keys, told, depth=0)
    written = None if visible else tuple(writer.chosen)
    return Turn(casual(rng, prompt) if visible else prompt, writer.text, written=written)


def _sum_in_json(rng: random.Random) -> Turn:
    """The parts of a sum, in some of the ways to name them."""
    a, b = rng.randint(1, 20), rng.randint(1, 20)
    sign, result = rng.choice((("+", a + b), ("-", a - b), ("*", a * b)))
    names = rng.choice(
        (
            ("left", "sign", "right"),
            ("a", "operator", "b"),
            ("left", "op", "right"),
            ("x", "sign", "y"),
        )
    )
    values: dict[str, object] = dict(zip(names, (a, sign, b), strict=True))
    if rng.random() < 0.5:
        values[rng.choice(("result", "answer", "sum"))] = result
    writer = _Writer()
    writer.fixed("{")
    for at, (key, value) in enumerate(values.items()):
        writer.fixed(("" if at == 0 else " ") + f'"{key}": ')
        _value(writer, value)
        writer.free("}" if at == len(values) - 1 else ",")
    return Turn(f"What is {a} {sign} {b}?", writer.text, written=tuple(writer.chosen))


def _value(writer: _Writer, value: object) -> None:
    if isinstance(value, str):
        writer.fixed('"')
        writer.free(json.dumps(value, ensure_ascii=False)[1:])
    else:
        writer.free(json.dumps(value))


def _thing(rng: random.Random) -> str:
    kind = rng.choice(("animals", "things", "fruits"))
    return rng.choice([*_WORDS[kind], "person", "mill", "book", "user", "shop", "film", "city"])


def _keys(rng: random.Random) -> list[str]:
    pools: list[list[str]] = [list(_TEXTS), list(_TEXTS), list(_NUMBERS), list(_NUMBERS),
                              list(_FLAGS), list(_LISTS), list(_NESTED)]  # fmt: skip
    keys = [rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.15:
        keys.append("".join(rng.choice("bcdfglmnprst") + rng.choice("aeiou") for _ in range(2)))
    return list(dict.fromkeys(keys))


def _vague(rng: random.Random, told: dict[str, Any]) -> str:
    """A question; `told` gets what it says of the values."""
    name, city = rng.choice(_WORDS["names"]), rng.choice(_WORDS["cities"])
    age, fruit = rng.randint(1, 90), rng.choice(_WORDS["fruits"])
    sentence, facts = rng.choice(
        (
            (f"{name} is {age} years old.", {"name": name, "age": age}),
            (f"{name} is {age} and lives in {city}.", {"name": name, "age": age, "city": city}),
            (f"{name} lives in {city}.", {"name": name, "city": city}),
            (f"{name} buys {age} {fruit}s.", {"name": name, "count": age, "item": fruit}),
            (f"My name is {name} and I am {age}.", {"name": name, "age": age}),
        )
    )
    form = rng.choice(_VAGUE)
    if "{sentence}" in form:
        told |= facts
    elif "{name}" in form:
        told["name"] = name
    return form.format(thing=_thing(rng), topic=rng.choice(_UNKNOWN), name=name, sentence=sentence)


def _object(
    rng: random.Random, writer: _Writer, keys: list[str], told: dict[str, Any], depth: int
) -> None:
    """Write an object with these keys; the model chooses its values, and to end it."""
    writer.fixed("{")
    for at, key in enumerate(keys):
        writer.fixed(("" if at == 0 else " ") + f'"{key}": ')
        if key in told:
            _value(writer, told[key])
        elif key in _NESTED and depth == 0:
            inner = [each for each in _keys(rng) if each not in _NESTED][:2] or ["name"]
            _object(rng, writer, inner, told, depth=1)
        elif key in _LISTS:
            _list(rng, writer, _WORDS[_LISTS[key]])
        elif key in _NUMBERS:
            _value(writer, rng.randint(1, _NUMBERS[key]))
        elif key in _FLAGS:
            _value(writer, rng.random() < 0.5)
        else:
            _value(writer, _text(rng, key))
        writer.free("}" if at == len(keys) - 1 else ",")


def _text(rng: random.Random, key: str) -> str:
    pool = _WORDS[_TEXTS.get(key, rng.choice(("things", "animals", "names")))]
    word = rng.choice(pool)
    if key in ("summary", "description", "text", "title", "answer") and rng.random() < 0.6:
        return f"a {rng.choice(_WORDS['colours'])} {word}"
    return word


def _list(rng: random.Random, writer: _Writer, pool: list[str]) -> None:
    writer.fixed("[")
    count = rng.choice((1, 2, 2, 3))
    for at, word in enumerate(rng.sample(pool, count)):
        if at:
            writer.fixed(" ")
        _value(writer, word)
        writer.free("]" if at == count - 1 else ",")
