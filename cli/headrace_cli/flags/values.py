"""Values in vLLM's short forms, written in full."""

import json
import re

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_POWERS = "kmgt"


def whole_number(text: str) -> str:
    """A number for 1k (1000) or 1K (1024), also with m, g and t. Other texts are unchanged."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        return text
    number, unit = found.groups()
    base = 1024 if unit.isupper() else 1000
    return str(int(float(number) * base ** (_POWERS.index(unit.lower()) + 1)))


def adapter(text: str) -> str:
    """NAME=PATH for an adapter that is a JSON object with name and path."""
    try:
        found = json.loads(text)
        return json.dumps({found["name"]: found["path"]})
    except (ValueError, TypeError, KeyError):
        return text
