"""The format of calls whose arguments are elements.

Arguments of type string are plain text up to a closing marker; a pattern enforces their schema. All
other arguments are JSON.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from headrace_common.structured.structural_format import (
    Alternatives,
    Const,
    Format,
    Json,
    Pattern,
    Repeat,
    Rule,
    Rules,
    Tag,
    Until,
)

from .arguments import Parameter, ValueKind, cannot_enforce, choices, parameters, target_of
from .constrained_text import text_up_to
from .constraint import CallConstraint, Function, sequence
from .elements import Elements

_KEY = re.compile(r"[\w.:/ -]{1,128}")


def element_format(constraint: CallConstraint, form: Elements) -> Format:
    return Rules(
        {each.name: _arguments(form, each) for each in constraint.functions},
        _calls(constraint, form),
    )


def _calls(constraint: CallConstraint, form: Elements) -> Format:
    if form.several:
        call = constraint.each(lambda each: Tag(_begin(form, each), Rule(each.name), form.end))
        return constraint.block(form.opening, constraint.calls(call), form.closing, prefix="\n")
    tags = [
        Tag(form.opening + _begin(form, each), Rule(each.name), form.end + form.closing)
        for each in constraint.functions
    ]
    return constraint.tagged(form.opening, tags, *_bare_tags(constraint, form))


def _bare_tags(constraint: CallConstraint, form: Elements) -> Iterator[tuple[str, Tag]]:
    """Yields calls without their opening."""
    for each in constraint.functions if form.bare else ():
        yield form.bare, Tag(_begin(form, each).strip(), Rule(each.name), form.end.strip())


def _begin(form: Elements, function: Function) -> str:
    return form.begin.format(name=function.name)


def _arguments(form: Elements, function: Function) -> Format:
    if function.schema is None:
        return Repeat(_any_element(form), optional=True)
    found = [_element(form, function, each) for each in parameters(function.name, function.schema)]
    return sequence(*found)


def _any_element(form: Elements) -> Format:
    before, after = form.parameter.replace("{string}", "true").split("{name}")
    key = sequence(Const(before), Pattern(r"\w{1,64}"), Const(after))
    return sequence(key, Until(form.value_end), *_const(form.after))


def _element(form: Elements, function: Function, parameter: Parameter) -> Format:
    if _KEY.fullmatch(parameter.name) is None:
        raise cannot_enforce(function.name, parameter.name, "its name cannot be written")
    try:
        value = _value(form, parameter)
    except ValueError as error:
        raise cannot_enforce(function.name, parameter.name, str(error)) from error
    is_text = "true" if parameter.kind is ValueKind.TEXT else "false"
    begin = form.parameter.format(name=parameter.name, string=is_text)
    element = Tag(begin, value, form.after)
    return element if parameter.required else Repeat(element, optional=True, once=True)


def _value(form: Elements, parameter: Parameter) -> Format:
    end = form.pad + form.value_end
    if parameter.kind is ValueKind.JSON or (form.says_texts and parameter.kind != ValueKind.TEXT):
        return sequence(Json(parameter.schema), Const(end))
    ways = list(_texts(form, parameter.schema, parameter.schema, parameter.kind))
    return ways[0] if len(ways) == 1 else Alternatives(tuple(ways))


def _texts(
    form: Elements, schema: Mapping[str, Any], whole: Mapping[str, Any], kind: ValueKind
) -> Iterator[Format]:
    """Returns the ways to write a text; a null is the word `null`. Raises ValueError."""
    schema = target_of(schema, whole)
    for branch in schema.get("anyOf", ()):
        yield from _texts(form, branch, whole, kind)
    if "anyOf" in schema:
        return
    end = Const(form.pad + form.value_end)
    types = schema.get("type")
    null = types == "null" or (isinstance(types, list) and "null" in types)
    values = choices(schema)
    if values is not None:
        given = schema.get("enum", [schema.get("const")])
        null = None in given
        for value in values:
            yield sequence(*_const(_written(form, value, kind)), end)
    elif types != "null":
        yield _text(form, schema, kind)
    if null:
        yield sequence(Const("null"), end)


def _written(form: Elements, value: str, kind: ValueKind) -> str:
    if form.value_end in value:
        raise ValueError(f"{form.value_end} is in one of its values")
    if kind is ValueKind.NULLABLE_TEXT and value.strip() in ("null", "None"):
        raise ValueError(f"{value!r} is read as null")
    return value


def _text(form: Elements, schema: Mapping[str, Any], kind: ValueKind) -> Format:
    text = text_up_to(form.value_end, schema, form.pad)
    if text.pattern and kind is ValueKind.NULLABLE_TEXT:
        raise ValueError("a text that may be null cannot have a pattern or a length")
    return text


def _const(text: str) -> tuple[Const, ...]:
    return (Const(text),) if text else ()
