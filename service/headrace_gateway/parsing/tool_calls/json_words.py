"""Turns values that a model has written as JSON, or as Python literals, into JSON."""

import ast
import json

_WORDS = {"True": "true", "False": "false", "None": "null"}


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def as_json(text: str) -> str:
    """Returns valid JSON as it is, Python's words and literals as JSON, and any other text as a
    JSON string."""
    plain = text.strip()
    if is_json(plain):
        return plain
    return _WORDS.get(plain) or _literal(plain) or quoted(text)


def _literal(text: str) -> str | None:
    """Returns the JSON of a Python list or dict; None if `text` is neither."""
    if not text.startswith(("[", "{")):
        return None
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")
