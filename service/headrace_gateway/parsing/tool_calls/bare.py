"""Removes the parts of schemas that are only for readers: models see these in their prompts."""

from collections.abc import Mapping
from typing import Any

from headrace_common.structured.structured import MAX_DEPTH

_ANNOTATIONS = frozenset({"$comment", "title", "description", "default", "examples", "deprecated"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_ONE = frozenset({"items", "additionalProperties"})
_SEVERAL = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})


def bare(schema: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Returns the same schema, shorter. Parts that are nested too deep to be used stay as
    they are."""
    if depth > MAX_DEPTH:
        return dict(schema)
    return {
        key: _part(key, value, depth + 1)
        for key, value in schema.items()
        if key not in _ANNOTATIONS
    }


def _part(key: str, value: Any, depth: int) -> Any:
    if key in _NAMED and isinstance(value, Mapping):
        return {name: _schema(each, depth) for name, each in value.items()}
    if key in _SEVERAL and isinstance(value, list):
        return [_schema(each, depth) for each in value]
    return _schema(value, depth) if key in _ONE else value


def _schema(value: Any, depth: int) -> Any:
    return bare(value, depth) if isinstance(value, Mapping) else value
