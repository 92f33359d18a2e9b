"""The format of Gemma 4's calls: its schema decides how each value is written."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from headrace_common.structured.structural_format import (
    Alternatives,
    Const,
    Format,
    Json,
    OrderedList,
    Pattern,
    Repeat,
    Rule,
    Rules,
    Tag,
)

from .arguments import cannot_enforce, parameters, target_of
from .constrained_text import text_up_to
from .constraint import CallConstraint, Function, sequence
from .gemma4 import CLOSE, OPEN, QUOTE

MAX_DEPTH = 8
MAX_ITEMS = 32
_KEY = re.compile(r"[\w.$-]{1,128}", re.ASCII)
_PLACES = frozenset({"$defs", "definitions"})
_TEXT_KEYS = frozenset({"pattern", "minLength", "maxLength", "format"})
_OTHER_KEYS = frozenset({"items", "minItems", "maxItems", "properties", "required"})
_ENFORCED = _PLACES | _TEXT_KEYS | _OTHER_KEYS | {"type", "additionalProperties"}
_SCALARS = ("integer", "number", "boolean", "null")
# The depth of objects and arrays in a value without a schema.
_ANYTHING = 3


def gemma4_format(constraint: CallConstraint) -> Format:
    tags = [
        Tag(f"{OPEN}call:{each.name}{{", Rule(each.name), CLOSE) for each in constraint.functions
    ]
    rules = {_any(depth): _anything(depth) for depth in range(_ANYTHING + 1)}
    rules |= {each.name: _arguments(each) for each in constraint.functions}
    return Rules(rules, constraint.tagged(OPEN, tags))


_TEXT = Tag(QUOTE, text_up_to(QUOTE, {}))


def _any(depth: int) -> str:
    """Returns a rule's name that no function has."""
    return f"any {depth}"


def _anything(depth: int) -> Format:
    ways: list[Format] = [_TEXT, Json({"type": [*_SCALARS]})]
    if depth:
        inner = Rule(_any(depth - 1))
        pair = sequence(Pattern(r"\w{1,64}:"), inner)
        ways.append(Tag("[", Repeat(inner, Const(","), optional=True), "]"))
        ways.append(Tag("{", Repeat(pair, Const(","), optional=True), "}"))
    return Alternatives(tuple(ways))


def _arguments(function: Function) -> Format:
    """Returns the format of the arguments, with the closing brace."""
    if function.schema is None:
        pair = sequence(Pattern(r"\w{1,64}:"), Rule(_any(_ANYTHING)))
        return sequence(Repeat(pair, Const(","), optional=True), Const("}"))
    found = parameters(function.name, function.schema)
    values = {}
    for each in found:
        try:
            values[each.name] = _value(each.schema, each.schema)
        except ValueError as error:
            raise cannot_enforce(function.name, each.name, str(error)) from error
        if _KEY.fullmatch(each.name) is None:
            raise cannot_enforce(function.name, each.name, "its name cannot be written")
    return _pairs(values, [each.name for each in found if each.required])


def _pairs(values: Mapping[str, Format], required: Iterable[str]) -> Format:
    if not values:
        return Const("}")
    needed = tuple(number for number, name in enumerate(values) if name in required)
    pairs = tuple(Tag(f"{name}:", value) for name, value in values.items())
    return sequence(OrderedList(pairs, needed, ","), Const("}"))


def _value(schema: Any, whole: Mapping[str, Any], depth: int = 0) -> Format:
    """Returns the format of a value. Raises ValueError, which says what cannot be enforced."""
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    if not isinstance(schema, Mapping) or not schema.keys() - _PLACES:
        return Rule(_any(_ANYTHING))
    schema = target_of(schema, whole)
    if "const" in schema or "enum" in schema:
        return _choice(Const(_written(each)) for each in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return _choice(_value(each, whole, depth + 1) for each in schema["anyOf"])
    types = schema.get("type", "object")
    if isinstance(types, list):
        return _choice(_value({**schema, "type": each}, whole, depth + 1) for each in types)
    return _typed(types, schema, whole, depth)


def _typed(kind: str, schema: Mapping[str, Any], whole: Mapping[str, Any], depth: int) -> Format:
    if kind in _SCALARS:
        return Json({name: each for name, each in schema.items() if name not in _PLACES})
    if unknown := schema.keys() - _ENFORCED:
        raise ValueError(f"{sorted(unknown)[0]!r:.80} is in its schema")
    match kind:
        case "string":
            return Tag(QUOTE, text_up_to(QUOTE, schema))
        case "array":
            return _array(schema, whole, depth)
        case "object":
            return _object(schema, whole, depth)
    raise ValueError(f"{kind!r:.80} is not a type")


def _object(schema: Mapping[str, Any], whole: Mapping[str, Any], depth: int) -> Format:
    inner = schema.get("properties", {})
    values = {name: _value(each, whole, depth + 1) for name, each in inner.items()}
    if wrong := [name for name in values if _KEY.fullmatch(name) is None]:
        raise ValueError(f"{wrong[0]!r:.80} cannot be written")
    if missing := [name for name in schema.get("required", ()) if name not in values]:
        raise ValueError(f"{missing[0]!r:.80} is required and not described")
    return sequence(Const("{"), _pairs(values, schema.get("required", ())))


def _array(schema: Mapping[str, Any], whole: Mapping[str, Any], depth: int) -> Format:
    item = _value(schema.get("items", {}), whole, depth + 1)
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if max(least, most or 0) > MAX_ITEMS:
        raise ValueError(f"over {MAX_ITEMS} items cannot be counted")
    if most is None:
        first = [part for _ in range(least) for part in (item, Const(","))]
        rest = Repeat(item, Const(","), optional=not least)
        items: Format = sequence(*first[: 2 * (least - 1)] if least else (), rest)
    else:
        items = OrderedList((item,) * most, tuple(range(least)), ",") if most else sequence()
    return sequence(Const("["), items, Const("]"))


def _choice(ways: Iterable[Format]) -> Format:
    found = tuple(ways)
    return found[0] if len(found) == 1 else Alternatives(found)


def _written(value: Any) -> str:
    if isinstance(value, Mapping | list):
        raise ValueError("an object or an array is one of its values")
    if not isinstance(value, str):
        return json.dumps(value)
    if QUOTE in value:
        raise ValueError(f"{QUOTE} is in one of its values")
    return f"{QUOTE}{value}{QUOTE}"
