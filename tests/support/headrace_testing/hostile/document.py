"""The fields in the gateway's OpenAPI document, and bodies in which one of them has any value."""

import json
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace_testing.stack import MODEL

from .world import EMBEDDER, Target

MAX_DEPTH = 8
_MESSAGES = [{"role": "user", "content": "Tell me of the mill."}]
_CHAT = {"model": MODEL, "messages": _MESSAGES, "max_tokens": 4}
# Fields of a valid body for each route. Other routes get the fields that they require.
BASES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": {"model": MODEL, "prompt": "The mill", "max_tokens": 4},
    "/v1/embeddings": {"model": EMBEDDER, "input": "The mill"},
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank"),
        {"model": EMBEDDER, "query": "The mill", "documents": ["The river", {"text": "A wheel"}]},
    ),
    **dict.fromkeys(
        ("/v1/score", "/score"), {"model": EMBEDDER, "text_1": "The mill", "text_2": ["A wheel"]}
    ),
    "/v1/responses": {"model": MODEL, "input": "The mill", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"model": MODEL, "input": "The mill"},
    "/v1/messages": _CHAT,
    "/v1/messages/count_tokens": {"model": MODEL, "messages": _MESSAGES},
    "/tokenize": {"model": MODEL, "prompt": "The mill"},
    "/detokenize": {"model": MODEL, "tokens": [5, 6, 7]},
}
# Groups of fields of which a request may only have one.
_RIVALS = {("/tokenize", "messages"): "prompt"}
JSON = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """A step from an object to a field, or from a list (`name` is None) to an element."""

    container: JSON
    name: str | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value is in the bodies of a route, and what its schema is."""

    path: str
    steps: tuple[Step, ...]
    schema: JSON

    def __str__(self) -> str:
        names = ("[]" if step.name is None else f".{step.name}" for step in self.steps)
        return f"{self.path} {''.join(names).lstrip('.') or 'the body'}"


class Document:
    """An OpenAPI document."""

    def __init__(self, content: JSON) -> None:
        self._schemas: JSON = content["components"]["schemas"]
        self._paths: JSON = content["paths"]

    @property
    def places(self) -> list[Place]:
        """Every value of every JSON body, in a fixed order."""
        found = []
        for path, operations in sorted(self._paths.items()):
            body = operations.get("post", {}).get("requestBody", {}).get("content", {})
            if schema := body.get("application/json", {}).get("schema"):
                found += list(self._walk(path, (), schema, frozenset()))
        return found

    @property
    def reads(self) -> list[str]:
        """Paths for GET, with {names} in them."""
        return sorted(path for path, found in self._paths.items() if "get" in found)

    def body(self, place: Place, value: bytes) -> bytes:
        """A valid body in which the value at one place is `value`, which need not be JSON."""
        text = value
        for depth in range(len(place.steps), 0, -1):
            step = place.steps[depth - 1]
            if step.name is None:
                text = b"[" + text + b"]"
                continue
            given = BASES.get(place.path) if depth == 1 else None
            fields = dict(self._required(step.container) if given is None else given)
            fields.pop(step.name, None)
            fields.pop(_RIVALS.get((place.path, step.name), ""), None)
            rest = b"".join(b"%b: %b, " % (_dump(name), _dump(it)) for name, it in fields.items())
            text = b"{" + rest + _dump(step.name) + b": " + text + b"}"
        return text

    def sample(self, schema: JSON, depth: int = 0) -> Any:
        """A small value that a schema allows."""
        schema = self._resolved(schema)
        for kind in self._branches(schema):
            if "const" in kind:
                return kind["const"]
            if "enum" in kind:
                return kind["enum"][0]
            if depth > MAX_DEPTH:
                return None
            match kind.get("type"):
                case "string":
                    return "x"
                case "integer" | "number":
                    return kind.get("minimum", 1)
                case "boolean":
                    return True
                case "array":
                    return [self.sample(kind.get("items", {}), depth + 1)]
                case "object":
                    return self._required(kind, depth + 1)
        return None

    def _required(self, schema: JSON, depth: int = 0) -> JSON:
        fields = schema.get("properties", {})
        return {name: self.sample(fields[name], depth) for name in schema.get("required", ())}

    def _resolved(self, schema: JSON) -> JSON:
        reference = schema.get("$ref")
        return self._schemas[reference.rsplit("/", 1)[1]] if reference else schema

    def _branches(self, schema: JSON) -> list[JSON]:
        """The alternatives of a schema, without null."""
        options = schema.get("anyOf") or schema.get("oneOf")
        if options is None:
            return [] if schema.get("type") == "null" else [schema]
        return [kind for each in options for kind in self._branches(self._resolved(each))]

    def _walk(
        self, path: str, steps: tuple[Step, ...], schema: JSON, seen: frozenset[str]
    ) -> Iterator[Place]:
        yield Place(path, steps, schema)
        if len(steps) == MAX_DEPTH:
            return
        for kind in self._branches(self._resolved(schema)):
            name = kind.get("title", "")
            inside = seen | {name} if "properties" in kind else seen
            if "properties" in kind and name in seen:
                continue
            for field, value in kind.get("properties", {}).items():
                yield from self._walk(path, (*steps, Step(kind, field)), value, inside)
            if isinstance(values := kind.get("additionalProperties"), dict):
                if values.get("type") != "null":
                    yield from self._walk(path, (*steps, Step(kind, "5")), values, inside)
            if isinstance(items := kind.get("items"), dict):
                yield from self._walk(path, (*steps, Step(kind, None)), items, inside)


def read_document(target: Target) -> Document:
    request = urllib.request.Request(f"http://127.0.0.1:{target.api}/openapi.json")
    request.add_header("Authorization", f"Bearer {target.attacker}")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return Document(json.load(answer))


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()
