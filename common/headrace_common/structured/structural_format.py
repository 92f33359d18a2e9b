"""Formats of structural tags: fixed texts, JSON, patterns, grammars, free text, and combinations.

Kinds and JSON names are those of xgrammar's structural tags, with some kinds that it lacks. Sizes
and shapes are checked here, schemas and grammars are not.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

MAX_MARKER_CHARS = 1024
MAX_CONTENT_CHARS = 65_536
MAX_DEPTH = 32
MAX_ELEMENTS = 1024


def _kind(kind: str, **options: Any) -> Any:
    return field(metadata={"kind": kind}, **options)


@dataclass(frozen=True, slots=True)
class Const:
    """A fixed text."""

    type: ClassVar[str] = "const_string"
    value: str = _kind("content")


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that a regular expression matches."""

    type: ClassVar[str] = "regex"
    pattern: str = _kind("content")


@dataclass(frozen=True, slots=True)
class Json:
    type: ClassVar[str] = "json_schema"
    json_schema: Mapping[str, Any] = _kind("schema")


@dataclass(frozen=True, slots=True)
class Grammar:
    """Text that a grammar in Lark or GBNF (EBNF) describes."""

    type: ClassVar[str] = "grammar"
    grammar: str = _kind("content")


@dataclass(frozen=True, slots=True)
class AnyText:
    """Any text whose beginning the regular expression `unless` does not match."""

    type: ClassVar[str] = "any_text"
    unless: str = _kind("optional_text", default="")


@dataclass(frozen=True, slots=True)
class Until:
    """Text that `pattern` matches completely, up to and including the first `end`."""

    type: ClassVar[str] = "until"
    end: str = _kind("text")
    pattern: str = _kind("optional_text", default="")


@dataclass(frozen=True, slots=True)
class Concatenation:
    type: ClassVar[str] = "sequence"
    elements: tuple["Format", ...] = _kind("some_formats")


@dataclass(frozen=True, slots=True)
class Alternatives:
    type: ClassVar[str] = "or"
    elements: tuple["Format", ...] = _kind("formats")


@dataclass(frozen=True, slots=True)
class Repeat:
    """The content repeated, with `separator` between; `once`: at most once."""

    type: ClassVar[str] = "repeat"
    content: "Format" = _kind("format")
    separator: "Format | None" = _kind("optional_format", default=None)
    optional: bool = _kind("flag", default=False)
    once: bool = _kind("flag", default=False)


@dataclass(frozen=True, slots=True)
class OrderedList:
    """The elements in this order, with `separator` between. Only `required` ones must be there."""

    type: ClassVar[str] = "ordered_list"
    elements: tuple["Format", ...] = _kind("formats")
    required: tuple[int, ...] = _kind("numbers")
    separator: str = _kind("text")

    def __post_init__(self) -> None:
        if unknown := [each for each in self.required if not 0 <= each < len(self.elements)]:
            raise ValueError(f"required: there is no element {unknown[0]}")


@dataclass(frozen=True, slots=True)
class Tag:
    """`begin`, then the content, then `end`."""

    type: ClassVar[str] = "tag"
    begin: str = _kind("text")
    content: "Format" = _kind("format")
    end: str = _kind("optional_text", default="")


@dataclass(frozen=True, slots=True)
class TriggeredTags:
    """Free text in which each trigger begins one of the tags that begin with it.

    Raises ValueError if a tag begins with none of the triggers or with several.
    """

    type: ClassVar[str] = "triggered_tags"
    triggers: tuple[str, ...] = _kind("texts")
    tags: tuple[Tag, ...] = _kind("tags")
    at_least_one: bool = _kind("flag", default=False)
    stop_after_first: bool = _kind("flag", default=False)

    def __post_init__(self) -> None:
        for tag in self.tags:
            if sum(map(tag.begin.startswith, self.triggers)) != 1:
                raise ValueError(f"{tag.begin!r:.80} must begin with exactly one trigger")
        for trigger in self.triggers:
            if not any(tag.begin.startswith(trigger) for tag in self.tags):
                raise ValueError(f"no structure begins with the trigger {trigger!r:.80}")


@dataclass(frozen=True, slots=True)
class Rule:
    """One of the rules, by its name."""

    type: ClassVar[str] = "rule"
    name: str = _kind("text")


@dataclass(frozen=True, slots=True)
class Rules:
    """The content, with named rules that it refers to. Only the outermost format can be this.

    Raises ValueError for a reference to an unknown rule, or, within a rule, to a later one.
    """

    type: ClassVar[str] = "rules"
    rules: Mapping[str, "Format"] = _kind("named_formats")
    content: "Format" = _kind("format")

    def __post_init__(self) -> None:
        known = set[str]()
        for name, rule in self.rules.items():
            check_names(rule, known)
            known.add(name)
        check_names(self.content, known)


Format = (
    Const
    | Pattern
    | Json
    | Grammar
    | AnyText
    | Until
    | Concatenation
    | Alternatives
    | Repeat
    | OrderedList
    | Tag
    | TriggeredTags
    | Rule
    | Rules
)
_CLASSES: Mapping[str, type[Format]] = {
    each.type: each
    for each in (
        Const,
        Pattern,
        Json,
        Grammar,
        AnyText,
        Until,
        Concatenation,
        Alternatives,
        Repeat,
        OrderedList,
        Tag,
        TriggeredTags,
        Rule,
        Rules,
    )
}


# By class: each field's name, kind and default, in order.
_FIELDS: Mapping[type, tuple[tuple[str, str, Any], ...]] = {
    each: tuple((one.name, one.metadata["kind"], one.default) for one in fields(each))
    for each in _CLASSES.values()
}


def to_json(node: Format) -> dict[str, Any]:
    """The format as the dict of its JSON, which `from_json` reads."""
    written: dict[str, Any] = {"type": node.type}
    for name, kind, default in _FIELDS[type(node)]:
        value = getattr(node, name)
        if value != default:
            written[name] = _WRITERS[kind](value) if kind in _WRITERS else value
    return written


def from_json(raw: object, depth: int = 0) -> Format:
    """A format from a dict of JSON. Raises ValueError, which says what is wrong."""
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} formats")
    kind = raw.get("type") if isinstance(raw, Mapping) else None
    if not isinstance(raw, Mapping) or not isinstance(kind, str) or kind not in _CLASSES:
        raise ValueError(f"a format's type must be one of {', '.join(_CLASSES)}; not {kind!r:.80}")
    made = _CLASSES[kind]
    values = {
        name: _READERS[how](raw[name], name, depth + 1)
        if name in raw
        else _given(kind, name, default)
        for name, how, default in _FIELDS[made]
    }
    if unknown := raw.keys() - values.keys() - {"type"}:
        raise ValueError(f"{kind}: {sorted(map(str, unknown))[0]!r:.80} is not known")
    return made(**values)


def schemas(node: Format) -> Iterator[Mapping[str, Any]]:
    """All JSON schemas in a format."""
    return (each.json_schema for each in parts(node) if isinstance(each, Json))


def parts(node: Format) -> Iterator[Format]:
    """A format and all formats in it."""
    left = [node]
    while left:
        part = left.pop()
        yield part
        for name, kind, _ in _FIELDS[type(part)]:
            if kind in _INNER:
                left += _INNER[kind](getattr(part, name))


def check_names(node: Format, known: AbstractSet[str] = frozenset()) -> None:
    """Raises ValueError if a format refers to an unknown rule or contains rules."""
    for part in parts(node):
        if isinstance(part, Rule) and part.name not in known:
            raise ValueError(f"there is no rule {part.name!r:.80} before it is used")
        if isinstance(part, Rules):
            raise ValueError("only the outermost format can have rules")


def marker(text: object, name: str, limit: int = MAX_MARKER_CHARS) -> str:
    """Checks a text that marks a beginning. Raises ValueError."""
    if not isinstance(text, str) or not 0 < len(text) <= limit:
        raise ValueError(f"{name} must be texts of 1 to {limit} characters")
    return text


def _given(kind: str, name: str, default: Any) -> Any:
    if default is MISSING:
        raise ValueError(f"{kind} must have {name}")
    return default


def _optional_text(value: object, name: str, _: int) -> str:
    return marker(value, name) if value else ""


def _texts(value: object, name: str, _: int) -> tuple[str, ...]:
    return tuple(marker(each, name) for each in _list(value, name))


def _optional_format(value: object, _: str, depth: int) -> Format | None:
    return None if value is None else from_json(value, depth)


def _formats(value: object, name: str, depth: int) -> tuple[Format, ...]:
    return tuple(from_json(each, depth) for each in _list(value, name))


def _some_formats(value: object, name: str, depth: int) -> tuple[Format, ...]:
    return tuple(from_json(each, depth) for each in _any_list(value, name))


def _named_formats(value: object, name: str, depth: int) -> dict[str, Format]:
    return {key: from_json(each, depth) for key, each in _of(value, Mapping, name).items()}


def _tags(value: object, name: str, depth: int) -> tuple[Tag, ...]:
    return tuple(_of(from_json(each, depth), Tag, name) for each in _list(value, name))


def _numbers(value: object, name: str, _: int) -> tuple[int, ...]:
    return tuple(_of(each, int, name) for each in _any_list(value, name))


def _list(value: object, name: str) -> list[object]:
    found = _any_list(value, name)
    if not found:
        raise ValueError(f"{name} must be a list that is not empty")
    return found


def _any_list(value: object, name: str) -> list[object]:
    found: list[object] = _of(value, list, name)
    if len(found) > MAX_ELEMENTS:
        raise ValueError(f"{name} may have at most {MAX_ELEMENTS} elements")
    return found


def _of(value: object, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be of the type {kind.__name__.lower()}")
    return value


_READERS: Mapping[str, Callable[[object, str, int], Any]] = {
    "text": lambda value, name, _: marker(value, name),
    "content": lambda value, name, _: marker(value, name, MAX_CONTENT_CHARS),
    "optional_text": _optional_text,
    "texts": _texts,
    "schema": lambda value, name, _: _of(value, Mapping, name),
    "flag": lambda value, name, _: _of(value, bool, name),
    "numbers": _numbers,
    "format": lambda value, _, depth: from_json(value, depth),
    "optional_format": _optional_format,
    "formats": _formats,
    "some_formats": _some_formats,
    "named_formats": _named_formats,
    "tags": _tags,
}
# Kinds that need an encoding.
_WRITERS: Mapping[str, Callable[[Any], Any]] = {
    "schema": dict,
    "format": to_json,
    "optional_format": to_json,
    "formats": lambda value: [*map(to_json, value)],
    "some_formats": lambda value: [*map(to_json, value)],
    "tags": lambda value: [*map(to_json, value)],
    "named_formats": lambda value: {name: to_json(each) for name, each in value.items()},
}
# Formats that are fields of these kinds.
_INNER: Mapping[str, Callable[[Any], Iterable[Format]]] = {
    "format": lambda value: (value,),
    "optional_format": lambda value: () if value is None else (value,),
    "formats": iter,
    "some_formats": iter,
    "tags": iter,
    "named_formats": lambda value: value.values(),
}
