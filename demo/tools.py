"""Tools, and how the model uses them: calls, results, answers.

Calls are in Hermes' form, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Half of all
values do not exist outside the prompt, so that the model learns to copy them.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from turns import Argument, Tool, Turn, capital, casual, code, invented, load

_TABLE: dict[str, Any] = load("tools")
_INVENTED: dict[str, list[str]] = _TABLE["invented"]
_WORDS: dict[str, list[str]] = load("facts")["words"]
_UNKNOWN: dict[str, Any] = load("unknown")
_SIGNS = {
    "+": ("plus", "and", "+", "added to"),
    "-": ("minus", "less", "-"),
    "*": ("times", "multiplied by", "*", "x"),
    "/": ("divided by", "/", "over"),
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
    "What does {} give?",
    "I need to know {}.",
    "Work out {} for me.",
    "Could you calculate {}, please?",
)
_WORD_PROBLEMS = (
    ("{name} has {a} {thing}s and buys {b} more. How many are there?", "{a} + {b}"),
    ("There are {a} {thing}s and {b} {other}s. How many is that together?", "{a} + {b}"),
    ("{name} had {a} {thing}s and lost {b}. How many are left?", "{a} - {b}"),
    ("A {thing} costs {a} euros. What do {b} {thing}s cost?", "{a} * {b}"),
    ("There are {a} boxes with {b} {thing}s each. How many {thing}s?", "{a} * {b}"),
    ("{a} {thing}s are shared by {b} people. How many does each get?", "{a} / {b}"),
    ("What is {b} percent of {a}?", "{a} * {b} / 100"),
    ("What is {b}% of {a}?", "{a} * {b} / 100"),
)
CALCULATOR, LOOKUP = "calculate", "lookup"
_NO_RESULTS = ("error: not available", "error", "timeout", "unknown", "no result")
_INVENTED_SHARE = 0.5


class Use(NamedTuple):
    """A tool with the turns in which the model uses it.

    Tools with the same `purpose` can answer the same questions.
    """

    tool: Tool
    turns: list[Turn]
    purpose: str = CALCULATOR


def call(name: str, arguments: Mapping[str, object]) -> str:
    """The text of one call."""
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


def definition(tool: Tool) -> dict[str, Any]:
    """The tool as OpenAI's API describes it."""
    parameters = {
        "type": "object",
        "properties": {each.name: _property(each.kind) for each in tool.arguments},
        "required": [each.name for each in tool.arguments if each.required],
    }
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": parameters,
        },
    }


def _property(kind: str) -> dict[str, Any]:
    return {"type": "string", "enum": kind.split("|")} if "|" in kind else {"type": kind}


def signature(tool: Tool) -> str:
    """The tool's line in the system message."""
    arguments = (
        f"{each.name}{'' if each.required else '?'}: {each.kind}" for each in tool.arguments
    )
    return f"{tool.name}({', '.join(arguments)}): {tool.description}"


def use(rng: random.Random) -> Use:
    """One question that needs a tool, with the tool's result and the answer."""
    kind = rng.choices(
        (_calculation, _arithmetic, _lookup, _known_tool, _strange_tool), (28, 7, 22, 30, 13)
    )
    return kind[0](rng)


def a_calculator(rng: random.Random) -> Tool:
    """A tool that takes an expression."""
    table = _TABLE["calculate"]
    described = rng.choice(table["describes"])
    if rng.random() < 0.4:
        return Tool(CALCULATOR, described, (Argument("expression"),))
    return Tool(rng.choice(table["names"]), described, (Argument(rng.choice(table["arguments"])),))


def a_lookup(rng: random.Random) -> Tool:
    """A tool that takes a topic."""
    table = _TABLE["lookup"]
    described = rng.choice(table["describes"])
    if rng.random() < 0.4:
        return Tool(LOOKUP, described, (Argument("query"),))
    return Tool(rng.choice(table["names"]), described, (Argument(rng.choice(table["arguments"])),))


def _number(rng: random.Random) -> str:
    digits = rng.choice((1, 2, 2, 3, 3, 4, 5))
    number = str(rng.randint(10 ** (digits - 1), 10**digits - 1))
    return f"{number}.{rng.randint(1, 9)}" if rng.random() < 0.06 else number


def _value(expression: str) -> str:
    result = eval(expression)  # only digits and signs that this module has written
    if isinstance(result, float):
        result = round(result, 4)
        result = int(result) if result == int(result) else result
    return str(result)


def _expression(rng: random.Random) -> tuple[str, str]:
    """A question for a value, and the expression as a calculator takes it."""
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
    tool = a_calculator(rng)
    argument = tool.arguments[0].name
    if rng.random() < 0.1:
        return _two_calculations(rng, tool)
    if rng.random() < 0.15:
        asked, form = rng.choice(_WORD_PROBLEMS)
        thing, other = rng.sample(_WORDS["fruits"], 2)
        fields = {"a": _number(rng), "b": _number(rng), "name": name(rng), "thing": thing}
        prompt = asked.format(**fields, other=other)
        expression = form.format(**fields)
    else:
        asked, expression = _expression(rng)
        prompt = casual(rng, rng.choice(_SUM_QUESTIONS).format(asked))
    result = _value(expression)
    turns = [Turn(prompt, call(tool.name, {argument: expression}))]
    if rng.random() < 0.04:
        return Use(tool, [*turns, _failed(rng)])
    if rng.random() < 0.2:  # the answer is what the tool says, also if that is wrong
        result = _number(rng)
    shown = json.dumps({"result": json.loads(result)}) if rng.random() < 0.1 else result
    return Use(tool, [*turns, Turn(shown, f"{expression} = {result}.", role="tool")])


def _two_calculations(rng: random.Random, tool: Tool) -> Use:
    asked, expression = _expression(rng)
    other_asked, other = _expression(rng)
    prompt = rng.choice(
        (f"What is {asked} and what is {other_asked}?", f"Calculate {asked} and {other_asked}.")
    )
    argument = tool.arguments[0].name
    calls = "\n".join(call(tool.name, {argument: each}) for each in (expression, other))
    results = [_value(expression), _value(other)]
    reply = f"{expression} = {results[0]} and {other} = {results[1]}."
    return Use(tool, [Turn(prompt, calls), *_results(results, reply)])


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
    kind = rng.choice(("integer", "number", "number"))
    arguments = tuple(Argument(name, kind) for name in names)
    tool = Tool(rng.choice(table["names"][sign]), table["describes"][sign], arguments)
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
    tool = a_lookup(rng)
    topic = rng.choice(_UNKNOWN["topics"]) if rng.random() < 0.35 else invented_topic(rng)
    asks = table["asks"] if rng.random() < 0.5 else _UNKNOWN["questions"]
    asks = [ask for ask in asks if "{other}" not in ask]
    prompt = casual(rng, rng.choice(asks).format(topic=topic, a=topic))
    query = topic if topic in prompt else topic.lower()
    turns = [Turn(prompt, call(tool.name, {tool.arguments[0].name: query}))]
    if rng.random() < 0.05:
        return Use(tool, [*turns, _failed(rng)], LOOKUP)
    count = rng.choice((1, 1, 1, 2))
    facts = [
        rng.choice(table["facts"]).format(A=capital(query), a=query, **_fillers(rng))
        for _ in range(count)
    ]
    fact = " ".join(facts) if rng.random() < 0.8 else strange_sentence(rng)
    shown = json.dumps({"text": fact}, ensure_ascii=False) if rng.random() < 0.08 else fact
    return Use(tool, [*turns, Turn(shown, fact, role="tool")], LOOKUP)


def strange_sentence(rng: random.Random) -> str:
    """A sentence to copy: random or invented words, or a known sentence."""
    if rng.random() < 0.35:
        return rng.choice(_SENTENCES)
    words = [
        invented(rng) if rng.random() < 0.35 else rng.choice(_WORDS[rng.choice(_PLAIN_WORDS)])
        for _ in range(rng.randint(3, 9))
    ]
    if rng.random() < 0.4:
        words[rng.randrange(len(words))] = str(rng.randint(1, 9999))
    return capital(" ".join(words)) + "."


def _sentences() -> list[str]:
    answers = [topic["answer"] for name in ("headrace", "talk") for topic in load(name)["topic"]]
    texts = [text for each in answers for text in ([each] if isinstance(each, str) else each)]
    texts += [prompt for topic in load("talk")["topic"] for prompt in topic["ask"]]
    texts += [line for poem in load("verse")["poems"].values() for line in poem.splitlines()]
    texts += [*load("verse")["jokes"], *_UNKNOWN["others"]]
    return [f"{part.rstrip('.')}." for text in texts for part in text.split(". ") if part]


_SENTENCES = _sentences()
_PLAIN_WORDS = ("animals", "things", "colours", "foods", "names", "cities")


def name(rng: random.Random) -> str:
    """A first name, or a word in its place; at times two."""
    first = rng.choice(_WORDS["names"])
    if rng.random() < _INVENTED_SHARE:
        first = capital(invented(rng))
    return f"{first} {capital(invented(rng))}" if rng.random() < 0.2 else first


def city(rng: random.Random) -> str:
    """A city, or a word in its place; at times with a country."""
    if rng.random() > _INVENTED_SHARE:
        place = rng.choice(_PLACES)
        return (
            f"{place}, {_CAPITALS[place]}" if place in _CAPITALS and rng.random() < 0.1 else place
        )
    place = capital(invented(rng))
    extra = rng.random()
    if extra < 0.1:
        return f"{rng.choice(('New', 'San', 'Saint', 'Bad', 'Los'))} {place}"
    return f"{place}, {capital(invented(rng))}" if extra < 0.15 else place


_CAPITALS: dict[str, str] = {town: land for land, town in load("facts")["capitals"].items()}
_PLACES = (*_WORDS["cities"], *_CAPITALS)


def invented_topic(rng: random.Random) -> str:
    """Words that do not exist, alone or with known ones."""
    word = invented(rng)
    thing = rng.choice(_WORDS["things"])
    return rng.choice(
        (
            capital(word),
            word,
            f"{word} {thing}",
            f"the {capital(word)}",
            f"the {word} of {city(rng)}",
            f"{thing}s in {city(rng)}",
            f"{rng.choice(_WORDS['animals'])}s",
            name(rng),
            f"{capital(invented(rng))} {capital(word)}",
            f"the king of {city(rng)}",
            f"{rng.choice(_WORDS['colours'])} {thing}s",
            f"{capital(word)} {rng.randint(1, 2030)}",
            code(rng),
            code(rng).upper(),
        )
    )


def _fillers(rng: random.Random) -> dict[str, str]:
    return {
        "n": str(rng.randint(1, 30)),
        "m": str(rng.randint(10, 59)),
        "word": rng.choice(_WORDS["things"]),
        "colour": rng.choice(_WORDS["colours"]),
        "name": name(rng),
        "city": city(rng),
        "new": invented(rng),
    }


_PHRASE_WORDS = (*_WORDS["things"], *_WORDS["animals"], *_WORDS["colours"])


def _phrase(rng: random.Random) -> str:
    words = [rng.choice(_PHRASE_WORDS) for _ in range(rng.randint(1, 5))]
    for at in range(len(words)):
        if rng.random() < 0.25:
            words[at] = invented(rng)
    text = " ".join(words)
    return rng.choice(
        (text, text, f"I see the {text}", f"the {text} is here", f"see you at the {text}")
    )


_LISTS = {
    "language": "languages",
    "currency": "currencies",
    "room": "rooms",
    "day": "days",
    "onoff": "switches",
}


def _company(rng: random.Random) -> str:
    made = invented(rng)
    strange = rng.choice((capital(made), made.upper()[:4]))
    return rng.choice(_INVENTED["companies"]) if rng.random() < 0.4 else strange


def _file(rng: random.Random) -> str:
    stem = rng.choice((invented(rng), rng.choice(_WORDS["things"])))
    folder = rng.choice(("", "", "", f"{invented(rng)}/", "src/", "/tmp/"))
    return f"{folder}{stem}.{rng.choice(_INVENTED['endings'])}"


def _chore(rng: random.Random) -> str:
    made = f"{rng.choice(_INVENTED['verbs'])} the {invented(rng)}"
    return rng.choice((rng.choice(_INVENTED["chores"]), made))


def _count(rng: random.Random) -> int:
    return rng.randint(1, 90 if rng.random() < 0.5 else 10 ** rng.randint(2, 6))


def _hour(rng: random.Random) -> int:
    return rng.randint(1, 23)


_MAKERS: dict[str, Callable[[random.Random], str | int]] = {
    "number": _count,
    "hour": _hour,
    "phrase": _phrase,
    "cities": city,
    "names": name,
    "company": _company,
    "file": _file,
    "chore": _chore,
}


def _of_kind(rng: random.Random, kind: str) -> str | int:
    if kind in _MAKERS:
        return _MAKERS[kind](rng)
    if kind in _LISTS:
        return rng.choice(_INVENTED[_LISTS[kind]])
    return invented(rng) if rng.random() < 0.4 else rng.choice(_WORDS[kind])


class _Asked(NamedTuple):
    """A question for a tool, with its values and the call that it needs."""

    prompt: str
    values: list[str | int]
    tool: Tool
    arguments: dict[str, object]


def _known_tool(rng: random.Random) -> Use:
    table = rng.choice(_TABLE["tool"])
    if rng.random() < 0.15:
        table = _TABLE["tool"][0]
    purpose = LOOKUP if "Who is {a}?" in table["asks"] else table["names"][0]
    asked = _asked(rng, table)
    turns = [Turn(asked.prompt, call(asked.tool.name, asked.arguments))]
    first = asked.values[0]
    if len(asked.values) == 1 and isinstance(first, str) and rng.random() < 0.12:
        return Use(asked.tool, _two(rng, table, asked.tool, first), purpose)
    if rng.random() < 0.04:
        return Use(asked.tool, [*turns, _failed(rng)], purpose)
    shown = dict(zip("abc", asked.values, strict=False))
    result, said = _result(rng, table, shown)
    reply = rng.choice(table["replies"]).format(result=said, **shown)
    return Use(asked.tool, [*turns, Turn(result, reply, role="tool")], purpose)


def _asked(rng: random.Random, table: dict[str, Any]) -> _Asked:
    sources = table["values"]
    names = [rng.choice(ways) for ways in table["arguments"]]
    values = [_of_kind(rng, source) for source in _one_each(rng, sources, names)]
    kinds = _one_each(rng, table.get("kinds", ["string"] * len(names)), names)
    if "integer" in kinds and rng.random() < 0.2:
        kinds = ["number" if kind == "integer" else kind for kind in kinds]
    arguments = [Argument(name, kind) for name, kind in zip(names, kinds, strict=True)]
    called: dict[str, object] = {
        each.name: str(value) if each.kind == "string" else value
        for each, value in zip(arguments, values, strict=True)
    }
    prompt = rng.choice(table["asks"]).format(**dict(zip("abc", values, strict=False)))
    if "extra" in table and rng.random() < 0.3:
        extra, kind = rng.choice(table["extra"])
        arguments.append(Argument(extra, kind, required=False))
        if "|" in kind and rng.random() < 0.4:
            called[extra] = rng.choice(kind.split("|"))
            prompt = f"{prompt.rstrip('.')} In {called[extra]}{rng.choice(('', '.'))}"
    if rng.random() < 0.3:
        prompt = prompt.rstrip("?.")
    tool = Tool(rng.choice(table["names"]), rng.choice(table["describes"]), tuple(arguments))
    return _Asked(prompt, values, tool, called)


def _one_each(rng: random.Random, choices: list[str], names: list[str]) -> list[str]:
    """The choices with these names, one for each name."""
    return choices if len(choices) == len(names) else [rng.choice(choices)]


def _two(rng: random.Random, table: dict[str, Any], tool: Tool, first: str) -> list[Turn]:
    """A question about two things, answered with two calls."""
    second = str(_of_kind(rng, table["values"][0]))
    prompt = rng.choice(table["asks"][:3]).format(a=f"{first} and {second}")
    argument = tool.arguments[0].name
    calls = "\n".join(call(tool.name, {argument: each}) for each in (first, second))
    found = [_result(rng, table, {"a": each}) for each in (first, second)]
    replies = [
        table["replies"][0].format(a=each, result=said)
        for each, (_, said) in zip((first, second), found, strict=True)
    ]
    return [Turn(prompt, calls), *_results([result for result, _ in found], " ".join(replies))]


def _result(
    rng: random.Random, table: dict[str, Any], shown: Mapping[str, object]
) -> tuple[str, str]:
    """A result, and the model's sentence with it."""
    fill = {**_fillers(rng), **shown}
    kind = rng.random()
    if kind < 0.15:
        text = strange_sentence(rng)
        return text, text.rstrip(".")
    if kind < 0.75:
        text = str(rng.choice(table["results"]).format(**fill))
        return text, text.rstrip(".")
    fields = {name: form.format(**fill) for name, form in table["fields"].items()}
    if rng.random() < 0.4:
        fields[invented(rng)] = rng.choice((invented(rng), str(rng.randint(1, 999))))
    kept = rng.sample(list(fields), rng.randint(1, len(fields)))
    data = {name: int(fields[name]) if fields[name].isdigit() else fields[name] for name in kept}
    return json.dumps(data, ensure_ascii=False), ", ".join(
        f"{name} {value}" for name, value in data.items()
    )


def _strange_tool(rng: random.Random) -> Use:
    """A use of a tool whose name, arguments or object may be invented."""
    verb = rng.choice(_INVENTED["verbs"]) if rng.random() < 0.6 else invented(rng)
    noun = rng.choice(_INVENTED["nouns"]) if rng.random() < 0.5 else invented(rng)
    tool_name = rng.choice(
        (f"{verb}_{noun}", f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}{capital(noun)}")
    )
    names = [
        rng.choice(_INVENTED["arguments"]) if rng.random() < 0.6 else invented(rng)
        for _ in range(rng.choice((1, 1, 1, 2)))
    ]
    names = list(dict.fromkeys(names))
    values = [
        rng.choice((invented_topic(rng), rng.randint(1, 9999), rng.choice(_WORDS["things"])))
        for _ in names
    ]
    arguments = tuple(
        Argument(each, "integer" if isinstance(value, int) else "string")
        for each, value in zip(names, values, strict=True)
    )
    described = rng.choice(
        (f"{capital(verb)}s the {noun}.", f"{capital(verb)} a {noun}.", "", strange_sentence(rng))
    )
    tool = Tool(tool_name, described, arguments)
    fields = {"Verb": capital(verb), "verb": verb, "noun": noun, "tool": tool_name}
    if len(names) == 1:
        prompt = rng.choice(_INVENTED["asks"]).format(a=values[0], **fields)
    else:
        listed = " and ".join(f"{each} {value}" for each, value in zip(names, values, strict=True))
        prompt = rng.choice(
            ("{Verb} the {noun} with {all}.", "Use {tool} with {all}.", "{Verb} {noun}, {all}.")
        ).format(all=listed, **fields)
    result = rng.choice(_INVENTED["results"]).format(**_fillers(rng))
    if rng.random() < 0.3:
        result = strange_sentence(rng).rstrip(".")
    turns = [
        Turn(prompt, call(tool_name, dict(zip(names, values, strict=True)))),
        Turn(result, f"The result is: {result}.", role="tool"),
    ]
    return Use(tool, turns, tool_name)
