"""Parameters of structured outputs, with vLLM's names, checked for size and shape.

Only the standard library. Whether a grammar compiles is not checked here; grammars that would be
too expensive to check are refused here.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from enum import StrEnum
from typing import Any

from . import structural_tag
from .ascii_classes import DATA_KEYWORDS
from .errors import SamplingError

MAX_CHARS = 65_536
# A structural tag may contain the schemas of many tools.
MAX_TAG_CHARS = 262_144
MAX_DEPTH = 128
MAX_CHOICES = 1024
# The maximal number of states of the automaton that checks a number's divisibility.
MAX_MULTIPLE = 10_000


class StructuredKind(StrEnum):
    JSON = "json"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


class StructuredOutputError(SamplingError):
    """A constraint that cannot be used. `field` is one of StructuredOutputsParams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The constraint that an output must match: exactly one of the fields is given.

    `json` is a JSON schema (a mapping or its text; stored as text), `regex` a regular expression
    for the whole output, `choice` the allowed outputs, `grammar` a grammar in Lark or GBNF (EBNF),
    `json_object` True any JSON object. `structural_tag` is text with structures in it (a mapping or
    its JSON; stored as JSON): see structural_tag.

    Raises StructuredOutputError.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Mapping[str, Any] | str | None = None

    def __post_init__(self) -> None:
        given = [one.name for one in fields(self) if getattr(self, one.name) not in (None, False)]
        if len(given) != 1:
            found = f"not {' and '.join(given)}" if given else "none is given"
            names = ", ".join(one.name for one in fields(self))
            raise StructuredOutputError(
                given[0] if given else "json", f"give exactly one of {names}; {found}"
            )
        match self.kind:
            case StructuredKind.JSON:
                object.__setattr__(self, "json", _schema_text(self.json))
            case StructuredKind.CHOICE:
                object.__setattr__(self, "choice", _choices(self.choice))
            case StructuredKind.STRUCTURAL_TAG:
                object.__setattr__(self, "structural_tag", _tag_text(self.structural_tag))
            case StructuredKind.JSON_OBJECT:
                if self.json_object is not True:
                    raise StructuredOutputError("json_object", "must be true or false")
            case StructuredKind.REGEX | StructuredKind.GRAMMAR as kind:
                _check_text(kind, self.source)

    @property
    def kind(self) -> StructuredKind:
        for kind in StructuredKind:
            if getattr(self, kind) not in (None, False):
                return kind
        raise AssertionError("one field is always given")

    @property
    def source(self) -> str | tuple[str, ...]:
        """The constraint's text; empty for any JSON object."""
        value = getattr(self, self.kind)
        return "" if value is True else value

    def to_wire(self) -> dict[str, object]:
        source = self.source
        return {"kind": str(self.kind), "source": source if isinstance(source, str) else [*source]}

    @classmethod
    def from_wire(cls, raw: object) -> "StructuredOutputsParams":
        """Inverse of to_wire. Raises StructuredOutputError."""
        if not isinstance(raw, Mapping) or raw.get("kind") not in set(StructuredKind):
            raise StructuredOutputError("kind", f"is not known: {raw!r:.80}")
        kind = StructuredKind(raw["kind"])
        value: Any = True if kind is StructuredKind.JSON_OBJECT else raw.get("source")
        named: dict[str, Any] = {kind.value: value}
        return cls(**named)


# The name that vLLM used before.
GuidedDecodingParams = StructuredOutputsParams


def _check_text(field: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise StructuredOutputError(field, "must be a text that is not empty")
    _check_size(field, len(text))


def _check_size(field: str, size: int, limit: int = MAX_CHARS) -> None:
    if size > limit:
        raise StructuredOutputError(
            field, f"{size} characters are over the limit of {limit}: make it smaller"
        )


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise StructuredOutputError("choice", "must be a list of texts that is not empty")
    if len(value) > MAX_CHOICES:
        raise StructuredOutputError(
            "choice", f"{len(value)} choices are over the limit of {MAX_CHOICES}"
        )
    for text in value:
        _check_text("choice", text)
    _check_size("choice", sum(map(len, value)))
    return tuple(value)


def _tag_text(value: object) -> str:
    """The structural tag as JSON. Its size is checked first: reading it takes far longer."""
    try:
        given = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as error:
        raise _not_a_tag(error) from error
    _check_size("structural_tag", len(given), MAX_TAG_CHARS)
    try:
        tag = structural_tag.read(value)
        text = tag.to_json()
    except (ValueError, TypeError, RecursionError) as error:
        raise _not_a_tag(error) from error
    _check_size("structural_tag", len(text), MAX_TAG_CHARS)
    for schema in tag.schemas():
        _check_schema(dict(schema))
    return text


def _not_a_tag(error: Exception) -> StructuredOutputError:
    return StructuredOutputError("structural_tag", f"{error!s:.200}")


def _schema_text(value: object) -> str:
    """The schema as JSON. Keeps the order of properties, which is also their order in the
    output."""
    schema = _parsed(value)
    if not isinstance(schema, dict):
        raise StructuredOutputError("json", "a schema must be a JSON object")
    _check_schema(schema)
    try:
        return _written(schema)
    except ValueError as error:  # NaN and Infinity, which Python's parser accepts
        raise _not_json(error) from error


def _written(schema: object) -> str:
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _parsed(value: object) -> object:
    """The value after a round trip through JSON, so that the checked value is the sent one."""
    try:
        text = value if isinstance(value, str) else _written(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise _not_json(error) from error
    _check_size("json", len(text))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from error


def _not_json(error: Exception) -> StructuredOutputError:
    return StructuredOutputError("json", f"is not valid JSON: {error!s:.200}")


def _check_schema(schema: dict[str, Any]) -> None:
    multiple = 1
    leading: set[str] = set()
    for node in _nodes(schema):
        reference = node.get("$ref")
        if isinstance(reference, str):
            _check_reference(schema, reference, leading)
        divisor = node.get("multipleOf")
        if isinstance(divisor, int | float) and divisor > 0:
            multiple = math.lcm(multiple, _digits(divisor))
            if multiple > MAX_MULTIPLE:
                raise StructuredOutputError(
                    "json",
                    f"multipleOf {divisor} is too fine: the least common multiple of all of them, "
                    f"without decimal points, may be at most {MAX_MULTIPLE}",
                )


def _nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All objects of a schema that may be schemas. Raises StructuredOutputError."""
    left: list[tuple[object, int]] = [(schema, 1)]
    while left:
        node, depth = left.pop()
        if depth > MAX_DEPTH:
            raise StructuredOutputError(
                "json",
                f"the schema is nested deeper than {MAX_DEPTH} objects and lists",
            )
        if isinstance(node, dict):
            yield node
            left += [(value, depth + 1) for key, value in node.items() if key not in DATA_KEYWORDS]
        elif isinstance(node, list):
            left += [(value, depth + 1) for value in node]


def _digits(number: float) -> int:
    """The digits of a number without decimal point and trailing zeros: 0.05 gives 5."""
    _, digits, _ = Decimal(str(number)).normalize().as_tuple()
    return max(1, int("".join(map(str, digits))))


def _check_reference(schema: dict[str, Any], reference: str, leading: set[str]) -> None:
    """Refuses references outside the schema, and chains of references without a schema at the end.

    `leading` are references known to lead to a schema; each is followed only once.
    """
    seen: set[str] = set()
    while reference not in leading:
        if not reference.startswith("#"):
            raise StructuredOutputError(
                "json",
                f"$ref {reference!r:.80} is outside of this schema: put its target under $defs",
            )
        if reference in seen:
            raise StructuredOutputError("json", f"$ref {reference!r:.80} leads only to itself")
        seen.add(reference)
        target = _resolve(schema, reference)
        following = target.get("$ref") if isinstance(target, dict) else None
        if not isinstance(following, str):
            break
        reference = following
    leading |= seen


def _resolve(schema: dict[str, Any], reference: str) -> object:
    """The target of a JSON pointer; None if it does not exist, which compiling reports."""
    node: object = schema
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(name)
        elif isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node
