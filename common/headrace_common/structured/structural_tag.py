"""Structural tags: text with structures in it, optionally after reasoning.

vLLM's `structural_tag`, with `structures` and `triggers` or with a `format`. The schemas in it are
not checked here.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from . import structural_format
from .structural_format import Format, Json, Rules, Tag, TriggeredTags, marker

MAX_STRUCTURES = 128
_KEYS = {"type", "structures", "triggers", "format", "reasoning"}


class ReasoningBegin(StrEnum):
    """Where a text begins: INSIDE reasoning, or as its first words show (OPEN)."""

    INSIDE = "inside"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Structure:
    """`begin`, then JSON of the schema, then `end`."""

    begin: str
    schema: Mapping[str, Any]
    end: str


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning at the text's beginning, in which triggers are only words.

    `closed`: the text cannot end in it; two line breaks may follow it.
    """

    opening: str
    closing: str
    begin: ReasoningBegin
    closed: bool = False


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """A text's format, optionally after reasoning. Raises ValueError for unknown rules."""

    format: Format
    reasoning: ReasoningFormat | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.format, Rules):
            structural_format.check_names(self.format)

    def to_json(self) -> str:
        """The tag as JSON that `read` reads; engines of older versions do not know `format`."""
        written: dict[str, Any] = {"type": "structural_tag", **_content(self.format)}
        if (found := self.reasoning) is not None:
            written["reasoning"] = {
                "opening": found.opening,
                "closing": found.closing,
                "begin": str(found.begin),
                **({"closed": True} if found.closed else {}),
            }
        return json.dumps(written, ensure_ascii=False, separators=(",", ":"), allow_nan=False)

    def schemas(self) -> Iterator[Mapping[str, Any]]:
        return structural_format.schemas(self.format)


def tagged(structures: Sequence[Structure], triggers: Sequence[str]) -> Format:
    """A tag of structures that each begin with exactly one of the triggers. Raises ValueError."""
    if not 0 < len(structures) <= MAX_STRUCTURES:
        raise ValueError(f"structures: give from 1 to {MAX_STRUCTURES} of them")
    tags = tuple(Tag(each.begin, Json(each.schema), each.end) for each in structures)
    return TriggeredTags(tuple(triggers), tags)


def read(value: object) -> StructuralTag:
    """A tag from a dict of JSON, or from its text. Raises ValueError, which says what is wrong."""
    raw = json.loads(value) if isinstance(value, str) else value
    if not isinstance(raw, Mapping) or raw.get("type", "structural_tag") != "structural_tag":
        raise ValueError('must be an object of the type "structural_tag"')
    if unknown := raw.keys() - _KEYS:
        raise ValueError(
            f"{sorted(unknown)[0]!r:.80} is not known: give structures and triggers, or a format"
        )
    reasoning = None if raw.get("reasoning") is None else _reasoning(raw["reasoning"])
    return StructuralTag(_format(raw), reasoning)


def may_reason(text: str) -> bool:
    """Whether a tag, in the form of `to_json`, allows reasoning."""
    return "reasoning" in json.loads(text)


def _content(node: Format) -> dict[str, Any]:
    if not isinstance(node, TriggeredTags) or node != TriggeredTags(node.triggers, node.tags):
        return {"format": structural_format.to_json(node)}
    schemas = [each.content.json_schema for each in node.tags if isinstance(each.content, Json)]
    if len(schemas) < len(node.tags) or len(schemas) > MAX_STRUCTURES:
        return {"format": structural_format.to_json(node)}
    return {
        "structures": [
            {"begin": each.begin, "schema": dict(schema), "end": each.end}
            for each, schema in zip(node.tags, schemas, strict=True)
        ],
        "triggers": [*node.triggers],
    }


def _format(raw: Mapping[str, Any]) -> Format:
    if raw.get("format") is not None:
        if raw.keys() & {"structures", "triggers"}:
            raise ValueError("give either structures and triggers, or a format")
        return structural_format.from_json(raw["format"])
    structures, triggers = raw.get("structures"), raw.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise ValueError("structures and triggers must be lists")
    return tagged(
        tuple(map(_structure, structures)), tuple(marker(each, "triggers") for each in triggers)
    )


def _structure(raw: object) -> Structure:
    if not isinstance(raw, Mapping) or not isinstance(raw.get("schema"), Mapping):
        raise ValueError("a structure must have begin, schema and end")
    end = raw.get("end", "")
    return Structure(
        marker(raw.get("begin"), "begin"), raw["schema"], marker(end, "end") if end else ""
    )


def _reasoning(raw: object) -> ReasoningFormat:
    if not isinstance(raw, Mapping):
        raise ValueError("reasoning must be an object")
    return ReasoningFormat(
        marker(raw.get("opening"), "opening"),
        marker(raw.get("closing"), "closing"),
        ReasoningBegin(marker(raw.get("begin"), "begin")),
        closed=raw.get("closed") is True,
    )
