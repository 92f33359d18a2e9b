"""The format of a text that ends at a marker and matches its schema."""

import re
from collections.abc import Mapping
from typing import Any

from headrace_common.structured.structural_format import Until

_LENGTHS = ("minLength", "maxLength")


def text_up_to(end: str, schema: Mapping[str, Any], pad: str = "") -> Until:
    """Returns the text, `pad` and `end`. Raises ValueError if the schema cannot be enforced."""
    pattern, lengths = schema.get("pattern"), [schema.get(each) for each in _LENGTHS]
    if pattern is None and lengths == [None, None]:
        return Until(end)
    if pattern is not None and lengths != [None, None]:
        raise ValueError("a pattern and a length cannot be enforced together")
    if isinstance(pattern, str):
        inner = _unanchored(pattern)
    else:
        least, most = lengths
        inner = rf"(.|\n){{{least or 0},{'' if most is None else most}}}"
    return Until(end, f"({inner}){pad}")


def _unanchored(pattern: str) -> str:
    """Returns a pattern for a whole text from one that may match in its middle."""
    if "|" in re.sub(r"\\.|\[[^\]]*\]|\((?:[^()]|\([^()]*\))*\)", "", pattern):
        raise ValueError("put the alternatives of its pattern in parentheses")
    before = "" if pattern.startswith("^") else r"(.|\n)*"
    ends = pattern.endswith("$") and not pattern.endswith(r"\$")
    after = "" if ends else r"(.|\n)*"
    return f"{before}({pattern.removeprefix('^').removesuffix('$' if ends else '')}){after}"
