"""Tools and what the model does with them: calls, results, answers.

Calls are in Hermes' form, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from turns import Tool, Turn, capital, casual, load

_TABLE: dict[str, Any] = load("tools")
_WORDS: dict[str, list[str]] = load("facts")["words"]
_UNKNOWN: dict[str, Any] = load("unknown")
_SIGNS = {
    "+": ("plus", "and", "+"),
    "-": ("minus", "less", "-"),
    "*": ("times", "multiplied by", "*", "x"),
    "/": ("divided by", "/"),
}
_SUM_QUESTIONS = (
    "What is {}?",
    "What is {}?",
    "How much is {}?",
    "Calculate {}.",
    "What's {}?",
    "{}",
    "{} = ?",
    "Compute {}.",
    "Please calculate {}.",
    "Can you work out {}?",
    "Use the calculator: {}",
    "Tell me what {} is.",
)
CALCULATOR, LOOKUP = "calculate", "lookup"
_NO_RESULTS = ("error: not available", "error", "timeout", "unknown", "no result")


class Use(NamedTuple):
    """A tool with the turns in which the model uses it."""

    tool: Tool
    turns: list[Turn]


def call(name: str, arguments: Mapping[str, object]) -> str:
    """The text of one call."""
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


def definition(tool: Tool) -> dict[str, Any]:
    """The tool as OpenAI's API describes it."""
    properties = {name: {"type": "string"} for name in tool.arguments}
    parameters = {"type": "object", "properties": properties, "required": list(tool.arguments)}
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": parameters,
        },
    }


def use(rng: random.Random) -> Use:
    """One question that needs a tool, with the tool's result and the answer."""
    kind = rng.choices(
        (_calculation, _arithmetic, _lookup, _known_tool, _invented), (34, 6, 25, 25, 10)
    )
    return kind[0](rng)


def some_tool(rng: random.Random) -> Tool:
    """A tool that may stay unused."""
    return use(rng).tool


def _number(rng: random.Random) -> str:
    digits = rng.choice((1, 2, 2, 3, 3, 4))
    number = str(rng.randint(10 ** (digits - 1), 10**digits - 1))
    return f"{number}.{rng.randint(1, 9)}" if rng.random() < 0.06 else number


def _value(expression: str) -> str:
    result = eval(expression)  # of digits and signs that this module has written
    if isinstance(result, float):
        result = round(result, 4)
        result = int(result) if result == int(result) else result
    return str(result)


def _expression(rng: random.Random) -> tuple[str, str]:
    """What a person asks for, and the expression in a calculator's form."""
    a, b = _number(rng), _number(rng)
    sign = rng.choice("++--***/")
    kind = rng.random()
    if kind < 0.2:
        c, other = _number(rng), rng.choice("+-*")
        text = rng.choice((f"({a} {sign} {b}) {other} {c}", f"{a} {sign} {b} {other} {c}"))
        return text, text
    expression = f"{a} {sign} {b}"
    if kind < 0.5:
        return (expression if rng.random() < 0.7 else f"{a}{sign}{b}"), expression
    if sign == "+" and rng.random() < 0.3:
        return f"the sum of {a} and {b}", expression
    if sign == "*" and rng.random() < 0.2:
        return f"the product of {a} and {b}", expression
    return f"{a} {rng.choice(_SIGNS[sign])} {b}", expression


def _calculation(rng: random.Random) -> Use:
    table = _TABLE["calculate"]
    tool = Tool(
        rng.choice(table["names"]),
        rng.choice(table["describes"]),
        (rng.choice(table["arguments"]),),
    )
    if rng.random() < 0.5:
        tool = Tool(CALCULATOR, tool.description, ("expression",))
    asked, expression = _expression(rng)
    argument = tool.arguments[0]
    if rng.random() < 0.1:
        other_asked, other = _expression(rng)
        prompt = rng.choice(
            (f"What is {asked} and what is {other_asked}?", f"Calculate {asked} and {other_asked}.")
        )
        calls = "\n".join(call(tool.name, {argument: each}) for each in (expression, other))
        results = [_value(expression), _value(other)]
        reply = f"{expression} = {results[0]} and {other} = {results[1]}."
        return Use(tool, [Turn(prompt, calls), *_results(results, reply)])
    prompt = casual(rng, rng.choice(_SUM_QUESTIONS).format(asked))
    result = _value(expression)
    turns = [Turn(prompt, call(tool.name, {argument: expression}))]
    if rng.random() < 0.04:
        return Use(tool, [*turns, _failed(rng)])
    shown = json.dumps({"result": json.loads(result)}) if rng.random() < 0.1 else result
    return Use(tool, [*turns, Turn(shown, f"{expression} = {result}.", role="tool")])


def _results(results: Sequence[str], reply: str) -> list[Turn]:
    """Results of several calls: the model answers after the last one."""
    return [
        *(Turn(result, "", role="tool") for result in results[:-1]),
        Turn(results[-1], reply, role="tool"),
    ]


def _failed(rng: random.Random) -> Turn:
    return Turn(rng.choice(_NO_RESULTS), "The tool gave no result.", role="tool")


def _arithmetic(rng: random.Random) -> Use:
    table = _TABLE["arithmetic"]
    sign = rng.choice("+-*/")
    names = rng.choice(table["arguments"])
    tool = Tool(rng.choice(table["names"][sign]), table["describes"][sign], tuple(names))
    a, b = rng.randint(1, 9999), rng.randint(1, 999)
    expression = f"{a} {sign} {b}"
    asked = rng.choice((expression, f"{a} {rng.choice(_SIGNS[sign])} {b}"))
    prompt = casual(rng, rng.choice(_SUM_QUESTIONS).format(asked))
    result = _value(expression)
    called = call(tool.name, dict(zip(names, (a, b), strict=True)))
    answer = Turn(result, f"{expression} = {result}.", role="tool")
    return Use(tool, [Turn(prompt, called), answer])


def _lookup(rng: random.Random) -> Use:
    table = _TABLE["lookup"]
    tool = Tool(
        rng.choice(table["names"]),
        rng.choice(table["describes"]),
        (rng.choice(table["arguments"]),),
    )
    if rng.random() < 0.4:
        tool = Tool(LOOKUP, tool.description, ("query",))
    topic = rng.choice(_UNKNOWN["topics"]) if rng.random() < 0.5 else _invented_topic(rng)
    asks = table["asks"] if rng.random() < 0.4 else _UNKNOWN["questions"]
    asks = [ask for ask in asks if "{other}" not in ask]
    prompt = casual(rng, rng.choice(asks).format(topic=topic, a=topic))
    query = topic if topic in prompt else topic.lower()
    turns = [Turn(prompt, call(tool.name, {tool.arguments[0]: query}))]
    if rng.random() < 0.05:
        return Use(tool, [*turns, _failed(rng)])
    fact = rng.choice(table["facts"]).format(A=capital(query), a=query, **_fillers(rng))
    return Use(tool, [*turns, Turn(fact, fact, role="tool")])


def _invented_topic(rng: random.Random) -> str:
    """Words that do not exist, alone or with known ones, so that the model learns to copy."""
    syllables = "".join(
        rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.choice((2, 3)))
    )
    word = capital(syllables) if rng.random() < 0.5 else syllables
    thing, city = rng.choice(_WORDS["things"]), rng.choice(_WORDS["cities"])
    return rng.choice(
        (
            word,
            f"{word} {thing}",
            f"the {word}",
            f"{thing}s in {city}",
            f"{rng.choice(_WORDS['animals'])}s",
            f"{rng.choice(_WORDS['names'])} {capital(syllables)}",
            f"the king of {city}",
            f"{rng.choice(_WORDS['colours'])} {thing}s",
        )
    )


def _fillers(rng: random.Random) -> dict[str, str]:
    return {
        "n": str(rng.randint(1, 30)),
        "m": str(rng.randint(10, 59)),
        "word": rng.choice(_WORDS["things"]),
        "colour": rng.choice(_WORDS["colours"]),
        "name": rng.choice(_WORDS["names"]),
        "city": rng.choice(_WORDS["cities"]),
    }


def _of_kind(rng: random.Random, kind: str) -> str | int:
    if kind == "number":
        return rng.randint(1, 90)
    if kind == "language":
        return str(rng.choice(_TABLE["invented"]["languages"]))
    if kind == "phrase":
        words = [word for word in _WORDS["things"] if word.islower()]
        return " ".join(rng.sample(words, rng.randint(1, 4)))
    if kind == "word":
        return rng.choice(_WORDS["animals"] + _WORDS["things"])
    if kind == "cities" and rng.random() < 0.3:
        return capital(_invented_topic(rng).split()[0])
    return rng.choice(_WORDS[kind])


def _known_tool(rng: random.Random) -> Use:
    table = rng.choice(_TABLE["tool"])
    if rng.random() < 0.3:
        table = _TABLE["tool"][0]
    names = [rng.choice(ways) for ways in table["arguments"]]
    tool = Tool(rng.choice(table["names"]), rng.choice(table["describes"]), tuple(names))
    kinds = table["values"]
    if len(kinds) > len(names):
        kinds = [rng.choice(kinds)]
    values = [_of_kind(rng, kind) for kind in kinds]
    shown = dict(zip("ab", values, strict=False))
    prompt = rng.choice(table["asks"]).format(**shown)
    if not any(str(value) in prompt.lower() for value in values):
        prompt = prompt if rng.random() < 0.7 else prompt.rstrip("?.")
    turns = [Turn(prompt, call(tool.name, dict(zip(names, values, strict=True))))]
    if len(values) == 1 and isinstance(values[0], str) and rng.random() < 0.12:
        return Use(tool, _two(rng, table, tool, values[0]))
    if rng.random() < 0.04:
        return Use(tool, [*turns, _failed(rng)])
    result, said = _result(rng, table, shown)
    reply = rng.choice(table["replies"]).format(result=said, **shown)
    return Use(tool, [*turns, Turn(result, reply, role="tool")])


def _two(rng: random.Random, table: dict[str, Any], tool: Tool, first: str) -> list[Turn]:
    """A question about two things, answered with two calls."""
    second = str(_of_kind(rng, table["values"][0]))
    prompt = table["asks"][0].format(a=f"{first} and {second}")
    calls = "\n".join(call(tool.name, {tool.arguments[0]: each}) for each in (first, second))
    found = [_result(rng, table, {"a": each}) for each in (first, second)]
    replies = [
        table["replies"][0].format(a=each, result=said)
        for each, (_, said) in zip((first, second), found, strict=True)
    ]
    return [Turn(prompt, calls), *_results([result for result, _ in found], " ".join(replies))]


def _result(
    rng: random.Random, table: dict[str, Any], shown: Mapping[str, object]
) -> tuple[str, str]:
    """A result, and the same as the model says it."""
    fill = {**_fillers(rng), **shown}
    if rng.random() < 0.75:
        text = str(rng.choice(table["results"]).format(**fill))
        return text, text
    fields = {name: form.format(**fill) for name, form in table["fields"].items()}
    kept = rng.sample(list(fields), rng.randint(1, len(fields)))
    data = {name: int(fields[name]) if fields[name].isdigit() else fields[name] for name in kept}
    return json.dumps(data), ", ".join(f"{name} {value}" for name, value in data.items())


def _invented(rng: random.Random) -> Use:
    table = _TABLE["invented"]
    verb, noun = rng.choice(table["verbs"]), rng.choice(table["nouns"])
    name = rng.choice(
        (f"{verb}_{noun}", f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}{capital(noun)}")
    )
    tool = Tool(name, f"{capital(verb)}s the {noun}.", (rng.choice(table["arguments"]),))
    value: str | int = rng.choice(
        (_invented_topic(rng), rng.randint(1, 999), rng.choice(_WORDS["things"]))
    )
    prompt = rng.choice(table["asks"]).format(
        Verb=capital(verb), verb=verb, noun=noun, tool=name, a=value
    )
    result = rng.choice(table["results"]).format(**_fillers(rng))
    reply = Turn(result, f"The result is: {result}.", role="tool")
    return Use(tool, [Turn(prompt, call(name, {tool.arguments[0]: value})), reply])
