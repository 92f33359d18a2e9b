"""Single parameters, for formats that write each of them separately.

Such a format cannot express keywords of an object's schema other than its properties; these are
refused by name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace_common.structured.structured import StructuredOutputError

_PLACES = ("$defs", "definitions")
_ENFORCED = frozenset({"type", "properties", "required", "additionalProperties", *_PLACES})
_ANNOTATIONS = frozenset(
    {"$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated"}
)
_NAMED = frozenset({"enum", "const"})
_SHAPES = frozenset({"pattern", "minLength", "maxLength"})
_TEXT_KEYS = _NAMED | _SHAPES | {"type", "format"}
_MAX_DEPTH = 8
_STRINGS, _NULL = {"string"}, {"null"}


class ValueKind(StrEnum):
    """How a value is written in formats that write texts unquoted: as text, as null or text, or as
    JSON."""

    TEXT = "text"
    NULLABLE_TEXT = "nullable"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter. `schema` contains all definitions that it refers to."""

    name: str
    schema: Mapping[str, Any]
    required: bool

    @property
    def kind(self) -> ValueKind:
        types = _types(self.schema, self.schema)
        if types == _STRINGS:
            return ValueKind.TEXT
        return ValueKind.NULLABLE_TEXT if types == _STRINGS | _NULL else ValueKind.JSON


def parameters(name: str, schema: Mapping[str, Any]) -> list[Parameter]:
    """Returns the parameters of a function of this name. Raises StructuredOutputError."""
    if unknown := schema.keys() - _ENFORCED - _ANNOTATIONS:
        raise StructuredOutputError(
            "json",
            f"the parameters of {name} have {sorted(unknown)[0]!r:.80} beside their properties, "
            "which this model's call format cannot enforce: leave it out, or strict",
        )
    for reference in _references(schema):
        if not reference.startswith(("#/$defs/", "#/definitions/")):
            raise StructuredOutputError(
                "json",
                f"the parameters of {name} refer to {reference!r:.80}, which this model's call "
                "format cannot enforce: refer to $defs, or leave strict out",
            )
    found = known(schema)
    required = schema.get("required")
    needed = required if isinstance(required, list) else []
    return [
        *(Parameter(each, inner, each in needed) for each, inner in found.items()),
        *(Parameter(each, {}, required=True) for each in needed if each not in found),
    ]


def cannot_enforce(function: str, parameter: str, reason: str) -> StructuredOutputError:
    return StructuredOutputError(
        "json",
        f"parameter {parameter!r:.80} of {function} cannot be enforced by this model's call "
        f"format: {reason}; leave strict out",
    )


def kinds(schema: Mapping[str, Any] | None) -> dict[str, ValueKind]:
    """Returns how the values of known parameters are written."""
    found = known(schema or {})
    return {name: Parameter(name, inner, required=False).kind for name, inner in found.items()}


def known(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the parameters' schemas, each with all definitions."""
    found = schema.get("properties")
    shared = {place: schema[place] for place in _PLACES if place in schema}
    if not isinstance(found, Mapping):
        return {}
    return {
        name: {**inner, **shared} if isinstance(inner, Mapping) else {}
        for name, inner in found.items()
    }


def choices(schema: Mapping[str, Any]) -> list[str] | None:
    """Returns the texts that a text may be, if the schema lists them."""
    if not schema.keys() & _NAMED:
        return None
    return [each for each in _values(schema) if isinstance(each, str)]


def target_of(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what a schema refers to, in a whole with definitions.

    Returns the schema itself if it says more than that.
    """
    seen = set[str]()
    while isinstance(reference := schema.get("$ref"), str) and reference not in seen:
        seen.add(reference)
        target = _at(whole, reference)
        if target is None or schema.keys() - _ANNOTATIONS - {"$ref", *_PLACES}:
            return schema
        schema = target
    return schema


def _types(schema: object, whole: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Returns the types of values, if only `_TEXT_KEYS` constrain texts among them."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return {""}
    schema = target_of(schema, whole)
    keys = schema.keys() - _ANNOTATIONS - {*_PLACES}
    options = schema.get("anyOf")
    if isinstance(options, list) and keys == {"anyOf"}:
        return set[str]().union(*(_types(each, whole, depth + 1) for each in options))
    if keys - _TEXT_KEYS:
        return {""}
    if keys & _NAMED:
        if keys & _SHAPES:
            return {""}
        return {_type(each) for each in _values(schema)}
    types = schema.get("type")
    return {types} if isinstance(types, str) else set(types) if isinstance(types, list) else {""}


def _values(schema: Mapping[str, Any]) -> Sequence[object]:
    given = schema.get("enum", [schema.get("const")])
    return given if isinstance(given, list) else []


def _type(value: object) -> str:
    if isinstance(value, str):
        return "string"
    return "null" if value is None else ""


def _at(schema: Mapping[str, Any], reference: str) -> Mapping[str, Any] | None:
    place, _, name = reference.removeprefix("#/").partition("/")
    found = schema.get(place)
    target = found.get(name) if isinstance(found, Mapping) else None
    return target if isinstance(target, Mapping) else None


def _references(schema: object) -> Iterator[str]:
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, Mapping):
            reference = node.get("$ref")
            if isinstance(reference, str):
                yield reference
            left += node.values()
        elif isinstance(node, list):
            left += node
