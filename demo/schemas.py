"""Answers in JSON by a schema: data from a text, made-up objects, the parts of a sum.

In most examples the prompt has the schema: in words, as an example, or as JSON Schema. In the
others only the grammar has it and writes the names; the model learns to write the rest.
"""

import json
import random
from collections.abc import Mapping
from typing import Any

from tools import city, invented_topic, name, strange_sentence
from turns import Turn, capital, invented, load, spoken

_WORDS: dict[str, list[str]] = load("facts")["words"]
_TABLE: dict[str, Any] = load("schemas")
_INVENTED_SHARE = 0.4
_ASKS_FOR_TEXT = (
    "Extract the data: {text}",
    "{text}",
    "{text} Write this as JSON.",
    "Read this text: {text}",
    "Extract the information from this text: {text}",
    "What does this text say? {text}",
    "Text: {text}",
    "Give me the data of this text as JSON: {text}",
    "JSON, please: {text}",
    "Turn this into JSON: {text}",
)
_ASKS_FOR_THING = (
    "Make up a {thing}.",
    "Describe a {thing}.",
    "Invent a {thing}.",
    "Give me a {thing}.",
    "A {thing}, please.",
    "Tell me about a {thing}.",
    "Give me an example of a {thing}.",
    "Create a {thing}.",
    "Write a {thing} as JSON.",
)
_BY_KEYS = (
    "Give me JSON with {keys}.",
    "Answer as JSON with {keys}.",
    "Answer in JSON with the keys {keys}.",
    "Return a JSON object with {keys}.",
    "I need {keys} as JSON.",
    "Reply with JSON. Keys: {keys}.",
    "JSON with {keys}.",
    "Use the fields {keys}.",
)
_BY_SCHEMA = (
    "Answer in JSON with this schema: {schema}",
    "Use this JSON schema: {schema}",
    "Schema: {schema}",
    "Reply with JSON that fits this schema:\n{schema}",
    "JSON schema:\n{schema}",
    "Respond only with JSON. {schema}",
    "Answer as JSON that matches {schema}",
)
_TITLES = ("Person", "Item", "Data", "Answer", "Result", "Event", "Order")


def answer_in_json(rng: random.Random) -> tuple[str, Turn]:
    """A system message, often empty, and a question with an answer in JSON."""
    kind = rng.random()
    if kind < 0.12:
        values, prompt = _sum(rng)
    elif kind < 0.7:
        values, prompt = _told(rng)
    else:
        values, prompt = _made_up(rng)
    shown = rng.random()
    reply = json.dumps(values, ensure_ascii=False)
    if shown < 0.25:
        return "", Turn(prompt, reply, given=names_in(reply, values))
    if shown < 0.5:
        wish = rng.choice(_BY_KEYS).format(keys=_keys(rng, values))
    else:
        wish = rng.choice(_BY_SCHEMA).format(schema=_schema_text(rng, values))
    if rng.random() < 0.25:
        return wish, Turn(prompt, reply)
    between = "\n" if rng.random() < 0.4 else " "
    parts = (prompt, wish) if rng.random() < 0.7 else (wish, prompt)
    return "", Turn(between.join(parts), reply)


def is_told(turn: Turn) -> bool:
    """Whether the prompt contains every value of the reply."""
    return all(str(value) in turn.prompt for value in _all_values(json.loads(turn.reply)))


def _all_values(value: object) -> list[object]:
    if isinstance(value, dict):
        return [each for inner in value.values() for each in _all_values(inner)]
    if isinstance(value, list):
        return [each for inner in value for each in _all_values(inner)]
    return [value]


def names_in(reply: str, values: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """The spans that a grammar writes: the opening brace and the names."""
    spans = [(0, 1)]
    at = 0
    for key in _all_names(values):
        at = reply.index(f'"{key}": ', at) + 1
        spans.append((at, at + len(key)))
    return tuple(spans)


def _all_names(value: object) -> list[str]:
    if isinstance(value, dict):
        return [each for key, inner in value.items() for each in (key, *_all_names(inner))]
    if isinstance(value, list):
        return [each for inner in value for each in _all_names(inner)]
    return []


def _keys(rng: random.Random, values: Mapping[str, Any]) -> str:
    keys = [f'"{key}"' for key in values] if rng.random() < 0.2 else list(values)
    return rng.choice((spoken(keys), spoken(keys), ", ".join(keys)))


def _schema_text(rng: random.Random, values: Mapping[str, Any]) -> str:
    kind = rng.random()
    if kind < 0.15:
        return "{" + ", ".join(f'"{key}": {_type(value)}' for key, value in values.items()) + "}"
    if kind < 0.25:
        return json.dumps({key: _type(value) for key, value in values.items()})
    schema = schema_of(rng, values)
    if rng.random() < 0.4:
        schema["required"] = list(values)
    if rng.random() < 0.2:
        schema["additionalProperties"] = False
    if rng.random() < 0.3:
        schema = {"title": rng.choice(_TITLES), **schema}
    if rng.random() < 0.3:
        items = list(schema.items())
        rng.shuffle(items)
        schema = dict(items)
    indent = 2 if rng.random() < 0.1 else None
    return json.dumps(schema, ensure_ascii=False, indent=indent)


def schema_of(rng: random.Random, value: object) -> dict[str, Any]:
    """A JSON Schema that the value fits."""
    if isinstance(value, dict):
        titled = rng.random() < 0.15
        properties = {key: schema_of(rng, inner) for key, inner in value.items()}
        if titled:
            properties = {
                key: {"title": key.replace("_", " ").capitalize(), **inner}
                for key, inner in properties.items()
            }
        return {"type": "object", "properties": properties}
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(rng, value[0]) if value else {}}
    if isinstance(value, str) and rng.random() < 0.12:
        others = [rng.choice(_WORDS[rng.choice(("colours", "animals"))]) for _ in range(2)]
        choices = list(dict.fromkeys([value, *others]))
        rng.shuffle(choices)
        return {"type": "string", "enum": choices}
    return {"type": _type(value)}


def _type(value: object) -> str:
    if isinstance(value, dict):
        return "object"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds[type(value)]


def _sum(rng: random.Random) -> tuple[dict[str, Any], str]:
    """The parts of a sum, in some of the ways to name them."""
    large = rng.random() < 0.4
    a, b = (rng.randint(1, 9999 if large else 20) for _ in range(2))
    sign, result = rng.choice((("+", a + b), ("-", a - b), ("*", a * b)))
    names = rng.choice(
        (
            ("left", "sign", "right"),
            ("a", "operator", "b"),
            ("left", "op", "right"),
            ("x", "sign", "y"),
            ("first", "operation", "second"),
        )
    )
    values: dict[str, Any] = dict(zip(names, (a, sign, b), strict=True))
    if not large and max(a, b) <= 10 and rng.random() < 0.5:
        values[rng.choice(("result", "answer", "sum"))] = result
        if rng.random() < 0.3:
            values = {key: values[key] for key in list(values)[-1:]}
    ask = rng.choice(("What is {}?", "What is {}?", "Calculate {}.", "{}", "How much is {}?"))
    return values, ask.format(f"{a} {sign} {b}")


def _told(rng: random.Random) -> tuple[dict[str, Any], str]:
    """Some values from a text, in any order. The text also has other sentences."""
    if rng.random() < 0.15:
        return _told_list(rng)
    record = rng.choice(_TABLE["record"])
    fields = {field: _drawn(rng, kind) for field, kind in record["fields"].items()}
    text = rng.choice(record["texts"])
    used = [field for field in fields if f"{{{field}}}" in text]
    text = text.format(**fields)
    if rng.random() < 0.2:
        noise = strange_sentence(rng)
        text = f"{text} {noise}" if rng.random() < 0.5 else f"{noise} {text}"
    kept = rng.sample(used, rng.randint(1, len(used)))
    if rng.random() < 0.6:
        kept = [field for field in used if field in kept]
    names = {field: rng.choice(record["keys"][field]) for field in kept}
    values: dict[str, Any] = {names[field]: fields[field] for field in kept}
    values = {key: _as_number(value) for key, value in values.items()}
    if len(values) > 1 and rng.random() < 0.12:
        last = list(values)[-1]
        inner = rng.choice(("details", "data", "info", "more", "address"))
        if inner not in values:
            values[inner] = {last: values.pop(last)}
    if rng.random() < 0.08:
        values = {rng.choice(("person", "item", "result", "data", "entry")): values}
    return values, rng.choice(_ASKS_FOR_TEXT).format(text=text)


def _as_number(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _told_list(rng: random.Random) -> tuple[dict[str, Any], str]:
    """All things of a list, or a list of objects."""
    count = rng.choice((2, 2, 3, 3, 4))
    if rng.random() < 0.5:
        kind, keys = rng.choice(
            (
                ("names", ("names", "people", "users", "friends")),
                ("cities", ("cities", "places", "towns")),
                ("things", ("items", "things", "tags", "words")),
                ("animals", ("animals", "pets")),
            )
        )
        items = [str(_drawn(rng, kind)) for _ in range(count)]
        ask = rng.choice(
            (
                "I see {}.",
                "List these: {}",
                "Here are {}.",
                "There are {}.",
                "Extract: {}",
                "We have {}.",
            )
        )
        return {rng.choice(keys): items}, ask.format(spoken(items))
    rows = [{"name": name(rng), "age": rng.randint(1, 99)} for _ in range(min(count, 3))]
    text = " ".join(f"{row['name']} is {row['age']} years old." for row in rows)
    return {rng.choice(("people", "users", "persons")): rows}, rng.choice(_ASKS_FOR_TEXT).format(
        text=text
    )


def _drawn(rng: random.Random, kind: str) -> Any:
    if kind.startswith("number"):
        return str(rng.randint(1, int(kind.removeprefix("number"))))
    if kind == "names":
        return name(rng)
    if kind == "cities":
        return city(rng).split(",")[0]
    if kind == "title":
        colour, thing = _drawn(rng, "colours"), _drawn(rng, "things")
        known = f"The {colour.capitalize()} {thing.capitalize()}"
        return rng.choice((known, f"The {capital(invented(rng))}", capital(invented(rng))))
    if kind == "email":
        return f"{invented(rng)}@{invented(rng)}.{rng.choice(('com', 'org', 'net', 'de'))}"
    if kind == "date":
        return rng.choice(
            (
                f"{rng.randint(1, 28)} {rng.choice(('May', 'June', 'March', 'July'))}",
                f"20{rng.randint(10, 40)}-{rng.randint(10, 12)}-{rng.randint(10, 28)}",
                rng.choice(("Monday", "Tuesday", "Friday", "Sunday")),
            )
        )
    if rng.random() < _INVENTED_SHARE:
        return invented(rng)
    return rng.choice(_WORDS[kind])


def _made_up(rng: random.Random) -> tuple[dict[str, Any], str]:
    """Made-up values for the names of a schema."""
    made: dict[str, Any] = {}
    for _ in range(rng.randint(1, 5)):
        if rng.random() < 0.1:
            made[invented(rng)] = rng.choice((invented(rng), rng.randint(1, 99)))
        else:
            group = rng.choice(("texts", "texts", "numbers", "numbers", "flags", "lists"))
            key = rng.choice(list(_TABLE[group]))
            made[key] = _value_of(rng, group, key)
    if rng.random() < 0.1:
        inner = {key: _value_of(rng, "texts", key) for key in rng.sample(list(_TABLE["texts"]), 2)}
        made[rng.choice(("address", "owner", "details", "person", "data"))] = inner
    things = [*_WORDS["animals"], *_WORDS["things"], *_TABLE["things"]]
    thing = invented(rng) if rng.random() < 0.2 else rng.choice(things)
    ask = rng.choice(_ASKS_FOR_THING)
    prompt = ask.format(thing=thing)
    if rng.random() < 0.25:
        prompt = rng.choice(_TABLE["vague"]).format(topic=invented_topic(rng))
    return made, prompt


def _value_of(rng: random.Random, group: str, key: str) -> Any:
    if group == "numbers":
        return rng.randint(1, _TABLE["numbers"][key])
    if group == "flags":
        return rng.random() < 0.5
    if group == "lists":
        pool = _WORDS[_TABLE["lists"][key]]
        return rng.sample(pool, rng.choice((1, 2, 2, 3)))
    word = rng.choice(_WORDS[_TABLE["texts"][key]])
    if key in ("summary", "description", "text", "title", "answer") and rng.random() < 0.6:
        return f"a {rng.choice(_WORDS['colours'])} {word}"
    return word
