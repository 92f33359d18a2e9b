"""Text with structures in it: free until a trigger, then one of the structures that begin with it.

vLLM's `structural_tag` with `structures` and `triggers`. Says how it is written and as a grammar;
whether the schemas in it can be used is not decided here.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MAX_STRUCTURES = 128
MAX_MARKER_CHARS = 1024
_KEYS = {"type", "structures", "triggers", "reasoning"}


class Begin(StrEnum):
    """Where a text begins: in reasoning, or in what its own first words say."""

    INSIDE = "inside"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Structure:
    """`begin`, then JSON of the schema, then `end`."""

    begin: str
    schema: Mapping[str, Any]
    end: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning at the text's beginning, in which triggers are only words."""

    opening: str
    closing: str
    begin: Begin


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """Each structure begins with exactly one of the triggers. Raises ValueError, which says why."""

    structures: Sequence[Structure]
    triggers: Sequence[str]
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.structures) <= MAX_STRUCTURES:
            raise ValueError(f"structures: give from 1 to {MAX_STRUCTURES} of them")
        for structure in self.structures:
            if sum(map(structure.begin.startswith, self.triggers)) != 1:
                raise ValueError(f"{structure.begin!r:.80} must begin with exactly one trigger")
        for trigger in self.triggers:
            if not any(each.begin.startswith(trigger) for each in self.structures):
                raise ValueError(f"no structure begins with the trigger {trigger!r:.80}")

    def to_json(self) -> str:
        """As `read` reads it."""
        written: dict[str, Any] = {
            "type": "structural_tag",
            "structures": [
                {"begin": each.begin, "schema": dict(each.schema), "end": each.end}
                for each in self.structures
            ],
            "triggers": [*self.triggers],
        }
        if (found := self.reasoning) is not None:
            written["reasoning"] = {
                "opening": found.opening,
                "closing": found.closing,
                "begin": str(found.begin),
            }
        return _written(written)

    def grammar(self, whitespace: str) -> str:
        """Lark for llguidance; `whitespace` is a pattern for that between tokens of JSON."""
        rules = [*_START[None if self.reasoning is None else self.reasoning.begin]]
        if self.reasoning is not None:
            rules = [_with_markers(rule, self.reasoning) for rule in rules]
        rules += ["rest: structure* TEXT", "TEXT: /(.|\\n)*/"]
        rules += self._structures("structure", "TEXT")
        if self.reasoning is not None and self.reasoning.begin is Begin.OPEN:
            rules += self._structures("first", "PLAIN")
        for number, trigger in enumerate(self.triggers):
            bodies = [each for each in self.structures if each.begin.startswith(trigger)]
            rules.append(
                f"body_{number}: " + " | ".join(_body(each, trigger, whitespace) for each in bodies)
            )
        return "\n".join(["%llguidance {}", *rules, ""])

    def _structures(self, name: str, text: str) -> list[str]:
        """Rules for one structure behind free text, which ends where a trigger does."""
        numbers = range(len(self.triggers))
        return [
            f"{name}: " + " | ".join(f"{name}_{each} body_{each}" for each in numbers),
            *(f"{name}_{each}[lazy]: {text} {_written(self.triggers[each])}" for each in numbers),
        ]


# The first text is reasoning to its closing marker, or all of it is; or it is none.
_START: Mapping[Begin | None, Sequence[str]] = {
    None: ("start: rest",),
    Begin.INSIDE: (
        "start: reasoning rest | UNCLOSED",
        "reasoning[lazy]: /(.|\\n)*CLOSING/",
        "UNCLOSED: TEXT & ~/(.|\\n)*CLOSING(.|\\n)*/",
    ),
    Begin.OPEN: (
        "start: reasoning rest | UNCLOSED | PLAIN | first rest",
        "reasoning[lazy]: /\\s*OPENING(.|\\n)*CLOSING/",
        "UNCLOSED: /\\s*OPENING(.|\\n)*/ & ~/(.|\\n)*CLOSING(.|\\n)*/",
        "PLAIN: TEXT & ~/\\s*OPENING(.|\\n)*/",
    ),
}


def read(value: object) -> StructuralTag:
    """From JSON's values, or their text. Raises ValueError, which says what is wrong."""
    raw = json.loads(value) if isinstance(value, str) else value
    if not isinstance(raw, Mapping) or raw.get("type", "structural_tag") != "structural_tag":
        raise ValueError('must be an object of the type "structural_tag"')
    if unknown := raw.keys() - _KEYS:
        raise ValueError(f"{sorted(unknown)[0]!r:.80} is not known: give structures and triggers")
    structures, triggers = raw.get("structures"), raw.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise ValueError("structures and triggers must be lists")
    return StructuralTag(
        tuple(map(_structure, structures)),
        tuple(_marker(each, "triggers") for each in triggers),
        None if raw.get("reasoning") is None else _reasoning(raw["reasoning"]),
    )


def _structure(raw: object) -> Structure:
    if not isinstance(raw, Mapping) or not isinstance(raw.get("schema"), Mapping):
        raise ValueError("a structure must have begin, schema and end")
    end = raw.get("end", "")
    return Structure(
        _marker(raw.get("begin"), "begin"), raw["schema"], _marker(end, "end") if end else ""
    )


def _reasoning(raw: object) -> Reasoning:
    if not isinstance(raw, Mapping):
        raise ValueError("reasoning must be an object")
    return Reasoning(
        _marker(raw.get("opening"), "opening"),
        _marker(raw.get("closing"), "closing"),
        Begin(_marker(raw.get("begin"), "begin")),
    )


def _marker(text: object, name: str) -> str:
    if not isinstance(text, str) or not 0 < len(text) <= MAX_MARKER_CHARS:
        raise ValueError(f"{name} must be texts of 1 to {MAX_MARKER_CHARS} characters")
    return text


def _body(structure: Structure, trigger: str, whitespace: str) -> str:
    """What is behind the trigger."""
    guided = {**structure.schema, "x-guidance": {"whitespace_pattern": whitespace}}
    texts = (structure.begin[len(trigger) :], structure.end)
    begin, end = (_written(text) if text else "" for text in texts)
    return f"{begin} %json {_written(guided)} {end}"


def _with_markers(rule: str, reasoning: Reasoning) -> str:
    for word, marker in (("OPENING", reasoning.opening), ("CLOSING", reasoning.closing)):
        rule = rule.replace(word, re.escape(marker).replace("/", "\\/"))
    return rule


def _written(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
