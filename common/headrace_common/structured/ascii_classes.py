"""Regular expressions with the classes of ASCII: `\\d`, `\\w`, `\\s` and their opposites.

This is the dialect of every pattern of a structured output, as of Python's `re` with `re.ASCII`.
llguidance alone reads them as Unicode, except `\\d` and `\\w` in a JSON schema's `pattern`.
"""

import re
from typing import Any

_CLASSES = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": r"[\t-\r\x20]",
    "S": r"[^\t-\r\x20]",
}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
# In Lark: a text, a comment, or a regular expression; only the last is changed.
_LARK_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|(?://|\#)[^\n]*|(/(?:\\.|[^/\\\n])+/)')
# Keywords whose values are data and not schemas.
DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})
# Keywords whose values are schemas by name.
_NAMED = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})


def ascii_regex(pattern: str) -> str:
    """The pattern with these classes written out; also correct inside brackets."""
    return _ESCAPE.sub(lambda found: _CLASSES.get(found[1], found[0]), pattern)


def ascii_lark(grammar: str) -> str:
    """A grammar in Lark's syntax, with `ascii_regex` of each regular expression."""
    return _LARK_TOKEN.sub(lambda found: ascii_regex(found[0]) if found[1] else found[0], grammar)


def ascii_schema(schema: Any) -> Any:
    """A JSON schema with `ascii_regex` of `pattern` and of the keys of `patternProperties`."""
    if isinstance(schema, list):
        return [ascii_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: _keyword(name, value) for name, value in schema.items()}


def _keyword(name: str, value: Any) -> Any:
    if name in DATA_KEYWORDS:
        return value
    if name == "pattern" and isinstance(value, str):
        return ascii_regex(value)
    if name in _NAMED and isinstance(value, dict):
        return {key: ascii_schema(each) for key, each in value.items()}
    if name == "patternProperties" and isinstance(value, dict):
        return {ascii_regex(pattern): ascii_schema(each) for pattern, each in value.items()}
    return ascii_schema(value)
