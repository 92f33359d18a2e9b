"""The format of one call as Python writes it."""

import keyword
from collections.abc import Mapping
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
    Tag,
)
from headrace_common.structured.structured import StructuredOutputError

from .arguments import parameters
from .constraint import CallConstraint, Function, sequence


def call_rules(constraint: CallConstraint) -> dict[str, Format]:
    """Returns the formats of the functions' arguments by name. Raises StructuredOutputError."""
    for function in constraint.functions:
        _check_name(function)
    return {function.name: _arguments(function) for function in constraint.functions}


def call_format(function: Function) -> Format:
    return Tag(f"{function.name}(", Rule(function.name), ")")


def _arguments(function: Function) -> Format:
    if function.schema is None:
        pair = sequence(Pattern(r"[a-z]\w{0,63}="), Json({}))
        return Repeat(pair, Const(", "), optional=True)
    found = parameters(function.name, function.schema)
    for parameter in found:
        if not _is_name(parameter.name):
            raise StructuredOutputError(
                "json",
                f"parameter {parameter.name!r:.80} of {function.name} is not a Python identifier, "
                "as calls of this model need: rename it, or leave strict out",
            )
    if not found:
        return sequence()
    return OrderedList(
        tuple(Tag(f"{each.name}=", _python(each.schema)) for each in found),
        tuple(number for number, each in enumerate(found) if each.required),
        ", ",
    )


def _python(schema: Mapping[str, Any]) -> Format:
    """Returns the format of a value: JSON, but with True, False and None as in Python."""
    match schema.get("type"):
        case "boolean" if "enum" not in schema and "const" not in schema:
            return Alternatives((Const("True"), Const("False")))
        case "null":
            return Const("None")
        case [*types] if "null" in types and len(types) > 1 and "enum" not in schema:
            others = [each for each in types if each != "null"]
            return Alternatives((Json({**schema, "type": others}), Const("None")))
        case _:
            return Json(schema)


def _check_name(function: Function) -> None:
    if not all(map(_is_name, function.name.split("."))):
        raise StructuredOutputError(
            "json",
            f"{function.name!r} is not a Python identifier, as calls of this model need: rename "
            "it, or leave strict out",
        )


def _is_name(text: str) -> bool:
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text)
