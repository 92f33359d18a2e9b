"""Schemas, expressions, grammars and tags that are short and may be expensive to compile.

All their numbers and choices come from dice, so that an expensive one can be changed into a more
expensive one.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from .dice import Dice

JSON = dict[str, Any]
# Texts that constraints may have; some are over the limit.
MOST_CHARS = 80_000


def _object(properties: JSON, **more: Any) -> JSON:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def _letters(number: int) -> str:
    return "abcdefghij"[number % 10] * (1 + number // 10)


def pattern(dice: Dice, name: str = "pattern") -> str:
    """A regular expression whose automaton may be large."""
    n, m = dice.size(f"{name} n", 1, 2_000), dice.size(f"{name} m", 1, 300)
    kind = dice.pick(f"{name} kind", list(_PATTERNS))
    return _PATTERNS[kind](n, m)[: MOST_CHARS + 1]


_CLASSES = (r"\p{L}", r"[^a-z]", r"\w", r".", r"[\u4e00-\u9fff]", r"(?i:ß)", r"\PM")
_PATTERNS: Mapping[str, Callable[[int, int], str]] = {
    "counted": lambda n, m: f"(a{{1,{n}}}b?){{1,{m}}}",
    "counted thrice": lambda n, m: f"(((a?){{{m}}}b?){{{m}}}c?){{{n}}}",
    "far before the end": lambda n, m: f"(a|b)*a(a|b){{{n}}}",
    "far before the end of any": lambda n, m: f".*a.{{{n}}}",
    "counted classes": lambda n, m: f"{_CLASSES[m % len(_CLASSES)]}{{{n},{n + m}}}",
    "classes": lambda n, m: "".join(_CLASSES[i % len(_CLASSES)] + "+" for i in range(m)),
    "alternatives": lambda n, m: "|".join(_letters(i * 7) + str(i) for i in range(n)),
    "alternatives counted": lambda n, m: f"({'|'.join(map(str, range(n)))}){{1,{m}}}",
    "optional": lambda n, m: "a?" * n + "a" * m,
    "nested": lambda n, m: "(" * n + "a" + ")*" * n,
    "overlapping": lambda n, m: "|".join(f".*{_letters(i)}.*" for i in range(m)),
    "caseless": lambda n, m: f"(?i:{'aΣßİ' * m}){{0,{n}}}",
    "ranges": lambda n, m: f"[\\u0000-\\uffff]{{{n}}}[^\\x00-{chr(200 + m)}]{{{m}}}",
}


def schema(dice: Dice, name: str = "schema") -> JSON:
    """A JSON schema whose automaton may be large."""
    n, m = dice.size(f"{name} n", 1, 300), dice.size(f"{name} m", 1, 60)
    kind = dice.pick(f"{name} kind", list(_SCHEMAS))
    made: JSON = _SCHEMAS[kind](dice, n, m)
    return made


def _all_of(dice: Dice, n: int, m: int) -> JSON:
    parts = [
        {
            "anyOf": [
                {"type": "string", "pattern": f"{_letters(i)}{{{i + j}}}"} for j in range(m % 5)
            ]
        }
        for i in range(n)
    ]
    for part in parts:
        part["anyOf"].append({"type": dice.pick("other", ["object", "array", "string", "number"])})
    return {"allOf": parts}


def _patterns_at_once(dice: Dice, n: int, m: int) -> JSON:
    own = pattern(dice)
    several = [{"pattern": f".*{_letters(i)}.{{{m}}}"} for i in range(n)]
    return {"type": "string", "allOf": [*several, {"pattern": own}]}


def _nested_any(dice: Dice, n: int, m: int) -> JSON:
    made: JSON = {"type": "integer"}
    for depth in range(min(n, 120)):
        made = {"anyOf": [_object({"a": made}), {"type": "array", "items": {"const": depth}}]}
        if depth % 2 and m > 20:
            made = {"allOf": [made, {"anyOf": [{"type": "object"}, {"type": "array"}]}]}
    return made


def _references(dice: Dice, n: int, m: int) -> JSON:
    """Definitions of which each refers twice to the next one: 2^n paths."""
    definitions: JSON = {}
    for i in range(n):
        following = {"$ref": f"#/$defs/d{(i + 1) % n}"}
        again = {"allOf": [following, {"type": "object"}]} if m % 2 else following
        definitions[f"d{i}"] = _object({f"p{j}": again for j in range(1 + m % 4)})
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def _references_in_all_of(dice: Dice, n: int, m: int) -> JSON:
    leaf = {"type": "object", "properties": {_letters(i): {"type": "string"} for i in range(m)}}
    definitions: JSON = {"d0": leaf}
    for i in range(1, min(n, 60)):
        before = {"$ref": f"#/$defs/d{i - 1}"}
        definitions[f"d{i}"] = {"allOf": [before, before], "required": [_letters(i)]}
    return {"$defs": definitions, "$ref": f"#/$defs/d{len(definitions) - 1}"}


def _counted(dice: Dice, n: int, m: int) -> JSON:
    made: JSON = {"type": "string", "minLength": n, "maxLength": n * m}
    for _ in range(1 + m % 4):
        made = {"type": "array", "items": made, "minItems": m, "maxItems": n * m}
    return made


def _enumerated(dice: Dice, n: int, m: int) -> JSON:
    return {"enum": [_letters(i) * (m % 9 + 1) + str(i) for i in range(n * 10)]}


def _pattern_properties(dice: Dice, n: int, m: int) -> JSON:
    found = {f".*{_letters(i)}.{{0,{m}}}": {"type": "integer"} for i in range(n)}
    return {"type": "object", "patternProperties": found, "additionalProperties": {"const": 1}}


def _optional(dice: Dice, n: int, m: int) -> JSON:
    kinds: list[JSON] = [{"type": "integer"}, {"type": "string", "format": "date-time"}, {}]
    properties = {f"p{i}": kinds[m % len(kinds)] for i in range(n * 2)}
    return _object(properties, required=[f"p{i}" for i in range(0, n, m)])


def _numbers(dice: Dice, n: int, m: int) -> JSON:
    least = int("9" * n)
    made: JSON = {"type": dice.pick("number", ["integer", "number"]), "minimum": -least}
    made["maximum"] = least / 7 if n < 300 and m % 2 else least
    if m % 3:
        made["multipleOf"] = m * 97
    return made


def _formats(dice: Dice, n: int, m: int) -> JSON:
    names = ["email", "uri", "date-time", "ipv6", "uuid", "hostname", "duration", "time"]
    chosen = [{"format": names[(m + i) % len(names)]} for i in range(1 + n % 3)]
    return {"type": "array", "items": {"type": "string", "allOf": chosen}, "minItems": m}


def _one_of(dice: Dice, n: int, m: int) -> JSON:
    return {
        "oneOf": [
            _object({"k": {"const": i}, "v": {"type": "string", "maxLength": m}}, required=["k"])
            for i in range(n)
        ]
    }


def _tuple(dice: Dice, n: int, m: int) -> JSON:
    return {
        "type": "array",
        "prefixItems": [{"anyOf": [{"type": "null"}, {"type": "array"}]} for _ in range(n)],
        "minItems": m,
        "items": {"type": "string", "pattern": pattern(dice)},
    }


_SCHEMAS: Mapping[str, Callable[[Dice, int, int], JSON]] = {
    "anyOf in allOf": _all_of,
    "patterns at once": _patterns_at_once,
    "nested anyOf": _nested_any,
    "references": _references,
    "references in allOf": _references_in_all_of,
    "counted": _counted,
    "enumerated": _enumerated,
    "patternProperties": _pattern_properties,
    "optional properties": _optional,
    "numbers": _numbers,
    "formats": _formats,
    "oneOf": _one_of,
    "prefixItems": _tuple,
    "a pattern": lambda dice, n, m: {"type": "string", "pattern": pattern(dice)},
}


def grammar(dice: Dice) -> str:
    """A grammar in Lark's or GBNF's syntax."""
    n, m = dice.size("grammar n", 1, 400), dice.size("grammar m", 1, 400)
    return _GRAMMARS[dice.pick("grammar kind", list(_GRAMMARS))](dice, n, m)


def _slashed(text: str) -> str:
    return "/" + text.replace("/", "") + "/"


def _rules(mark: str, n: int, m: int) -> str:
    """Each rule contains the next one twice, so that a text has very many derivations."""
    root = "root" if "::" in mark else "start"
    lines = [f"{root} {mark} r0"]
    lines += [f'r{i} {mark} r{i + 1} r{i + 1} | r{i + 1} | "a"' for i in range(min(n, 120))]
    return "\n".join([*lines, f'r{min(n, 120)} {mark} "a" | "b"'])


_GRAMMARS: Mapping[str, Callable[[Dice, int, int], str]] = {
    "Lark, ambiguous": lambda dice, n, m: _rules(":", n, m),
    "GBNF, ambiguous": lambda dice, n, m: _rules("::=", n, m),
    "Lark, left recursion": lambda dice, n, m: 'start: start start | "a" | ""\n',
    "Lark, a terminal": lambda dice, n, m: f"start: A\nA: {_slashed(pattern(dice))}",
    "Lark, and": lambda dice, n, m: (
        "start: A\nA: " + " & ".join(f"/.*{_letters(i)}.{{{m}}}/" for i in range(min(n, 60)))
    ),
    "Lark, not": lambda dice, n, m: f"start: A\nA: ~/.*a.{{{m}}}/ & {_slashed(pattern(dice))}",
    "Lark, counted": lambda dice, n, m: f'start: a{{{n},{n * m}}}\na: b{{0,{m}}}\nb: "a"? "b"?',
    "Lark, terminals": lambda dice, n, m: (
        "start: "
        + " ".join(f"A{i}?" for i in range(min(n, 127)))
        + "".join(f"\nA{i}: /.*{_letters(i)}.{{0,{m}}}/" for i in range(min(n, 127)))
    ),
    "Lark, alternatives": lambda dice, n, m: (
        "start: " + " | ".join(f'"{_letters(i)}" start "{i}"' for i in range(n)) + ' | "z"'
    ),
    "Lark, lazy": lambda dice, n, m: f"start: x*\nx[lazy]: {_slashed(pattern(dice))}",
    "GBNF, counted": lambda dice, n, m: f'root ::= (("a" | "b"{{1,{n}}}){{1,{m}}} "c"){{1,{n}}}',
    "GBNF, brackets": lambda dice, n, m: "root ::= " + "(" * n + '"a"' + ")*" * n,
}


def structural_tag(dice: Dice) -> JSON:
    count = dice.size("structures", 1, 200)
    if dice.pick("tag kind", ["structures", "formats"]) == "structures":
        structures = [
            {"begin": f"<{i % 7}{i}", "schema": schema(dice, f"schema {i % 3}"), "end": ">"}
            for i in range(count)
        ]
        return {"structures": structures, "triggers": [f"<{i}" for i in range(7)]}
    return {"format": _nested_format(dice, min(count, 30))}


def _nested_format(dice: Dice, depth: int) -> JSON:
    leaves: list[JSON] = [
        {"type": "regex", "pattern": pattern(dice)},
        {"type": "json_schema", "json_schema": schema(dice)},
        {"type": "until", "end": "a" * depth, "pattern": pattern(dice)},
        {"type": "any_text", "unless": pattern(dice)},
    ]
    made = dice.pick("leaf", leaves)
    width = dice.size("width", 1, 12)
    for level in range(depth):
        match dice.pick(f"level {level % 4}", ["sequence", "or", "repeat", "ordered_list", "tag"]):
            case "repeat":
                made = {"type": "repeat", "content": made}
            case "tag":
                made = {"type": "tag", "begin": "<", "content": made, "end": ">"}
            case "ordered_list":
                made = {"type": "ordered_list", "elements": [made] * width, "separator": ","}
            case kind:
                made = {"type": kind, "elements": [made] * width}
        if len(json.dumps(made)) > 4 * MOST_CHARS:
            break
    return made


def choices(dice: Dice) -> list[str]:
    count, length = dice.size("choices", 1, 1_100), dice.size("length", 1, 2_000)
    return [f"{'a' * min(length, MOST_CHARS // count)}{i}" for i in range(count)]
