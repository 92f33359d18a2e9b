"""Describes bodies that are not parsed by the framework in the OpenAPI document."""

from collections.abc import Callable, Mapping, Set
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter

from ...schemas.answers import RequestObject
from ...schemas.events import STREAMS

_REF = "#/components/schemas/{model}"
_TEXT = {"type": ["string", "null"]}
_STRING = {"type": "string"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT,
                "code": _TEXT,
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "data": {"type": "string"},
        "event": {"type": "string"},
        "id": {"type": "string"},
    },
}
_READ_ERRORS: Mapping[int, str] = {
    400: "A field is wrong; the message names it.",
    401: "The API key is missing, unknown or expired.",
    403: "The API key does not allow this.",
    404: "It does not exist, or it is another tenant's.",
    409: "The stream cannot be resumed, or the request's id is in use for another request.",
    410: "The request's state is lost.",
    500: "Internal error.",
    503: "The service is unavailable or full; Retry-After says when to send the request again.",
}
_WRITE_ERRORS: Mapping[int, str] = {
    408: "The body did not arrive in time.",
    413: "The body, or what it holds, is too large.",
    415: "The body is compressed, or of another media type.",
    422: "The idempotency key was used for another body.",
    429: "A limit of the API key or its tenant is reached; Retry-After says for how long.",
    499: "The request was cancelled.",
    504: "The request's deadline has passed.",
}
_STREAMING = frozenset({"/v1/responses/{response_id}", "/v1/requests/{request_id}/events"})
_GENERATING = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
)


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """Returns a route's description of its body; `document_bodies` defines the name."""
    schema = {"$ref": _REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answer_of(kind: Any) -> dict[str, Any]:
    """Returns a route's description of its answer, which is not checked while it is served."""
    return {"response_model": None, "responses": {200: {"model": kind}}}


def _amend(app: FastAPI, amend: Callable[[dict[str, Any]], None]) -> None:
    """Has `amend` change the application's OpenAPI document when it is made, once."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        made = app.openapi_schema is not None
        document = generate()
        if not made:
            amend(document)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _components(document: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = document.setdefault("components", {}).setdefault(kind, {})
    return found


def document_bodies(app: FastAPI, kinds: tuple[type[BaseModel], ...]) -> None:
    """Adds the bodies' schemas to the application's OpenAPI document."""

    def amend(document: dict[str, Any]) -> None:
        schemas = _components(document, "schemas")
        for kind in kinds:
            schema = kind.model_json_schema(ref_template=_REF)
            schemas.update(schema.pop("$defs", {}))
            schemas[kind.__name__] = _or_null(schema)

    _amend(app, amend)


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a body in which null is the same as absent, as in `schemas.parse`."""
    null = {"type": "null"}
    required = schema.get("required", ())
    fields = {
        name: field if name in required else {"anyOf": [_without_null(field), null]}
        for name, field in schema["properties"].items()
    }
    return {**schema, "properties": fields, "additionalProperties": null}


def _without_null(field: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the field without a default of null, which its own schema may not allow."""
    return {name: value for name, value in field.items() if name != "default" or value is not None}


def document_errors(app: FastAPI) -> None:
    """Adds how every path can refuse a request, and in which form, to the OpenAPI document."""

    def amend(document: dict[str, Any]) -> None:
        errors = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
        _components(document, "schemas").update(errors)
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                responses = operation["responses"]
                responses.pop("422", None)
                responses.update(_errors(path, writes=method in ("post", "delete")))
                if path == "/console/live":
                    _document_live(responses)
                if path in _GENERATING or (path in _STREAMING and method == "get"):
                    event = _event(path, _components(document, "schemas"))
                    responses["200"]["content"]["text/event-stream"] = {"schema": event}
                if path in _GENERATING:
                    _document_accepted(responses, path)

    _amend(app, amend)


def _event(path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of an event of a path's streams, whose data is JSON if the type of the
    events is known; adds that type to `schemas`. An error may end a stream."""
    if path not in STREAMS:
        return _EVENT
    found = TypeAdapter(STREAMS[path]).json_schema(ref_template=_REF)
    defined = found.pop("$defs", {})
    if "title" in found:
        defined[found["title"]] = found
        found = {"$ref": _REF.format(model=found["title"])}
    schemas.update({name: one for name, one in defined.items() if name not in schemas})
    kinds = found.get("anyOf", [found])
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [*kinds, {"$ref": _REF.format(model=_error_of(path))}]},
    }
    return {**_EVENT, "properties": {**_EVENT["properties"], "data": data}}


def _error_of(path: str) -> str:
    return "AnthropicError" if path.startswith("/v1/messages") else "Error"


def _errors(path: str, *, writes: bool) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF.format(model=_error_of(path))}}}
    statuses = {**_READ_ERRORS, **(_WRITE_ERRORS if writes else {})}
    return {
        str(status): {"description": meaning, "content": content}
        for status, meaning in statuses.items()
    }


def _document_accepted(responses: dict[str, Any], path: str) -> None:
    content = responses["200"]["content"]["application/json"]
    if path != "/v1/responses":
        content = {"schema": {"$ref": _REF.format(model=RequestObject.__name__)}}
    responses["202"] = {
        "description": "The request runs in the background.",
        "content": {"application/json": content},
    }


def _document_live(responses: dict[str, Any]) -> None:
    responses["200"]["content"] = {"text/event-stream": {"schema": _EVENT}}
    responses["429"] = {**responses["503"], "description": "Too many consoles watch."}


def _header(name: str, meaning: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": meaning,
        "schema": schema,
    }


_NAME = _header("x-request-id", "Your name for the request, which the answer repeats.", _STRING)
_LIFETIME = (
    _header(
        "x-request-timeout",
        "Seconds until the request must have ended.",
        {"type": "number", "exclusiveMinimum": 0},
    ),
    _header(
        "x-request-deadline",
        "When the request must have ended: Unix seconds, or a time with its zone.",
        _STRING,
    ),
)
_KEY = _header(
    "Idempotency-Key",
    "The same key and body again give the same answer; nothing is computed twice.",
    {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"},
)
_RESUME = (
    _header(
        "x-resumable",
        "Whether the request outlives its connection: true or false.",
        {"type": "string", "pattern": "^([Tt][Rr][Uu][Ee]|[Ff][Aa][Ll][Ss][Ee])$"},
    ),
    _header("Last-Event-ID", "The last received event; the stream continues after it.", _STRING),
)
_QUEUED = frozenset(
    {*_GENERATING, "/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"}
)


def document_headers(app: FastAPI) -> None:
    """Adds the headers that the gateway reads, and its own URL, to the OpenAPI document."""

    def amend(document: dict[str, Any]) -> None:
        document["servers"] = [{"url": "/", "description": "This gateway."}]
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                headers = [_NAME, *_read_headers(path)] if method == "post" else [_NAME]
                operation["parameters"] = [*operation.get("parameters", ()), *headers]

    _amend(app, amend)


def _read_headers(path: str) -> list[dict[str, Any]]:
    """The headers that are read by a route of requests."""
    if path not in _QUEUED:
        return []
    if path in _GENERATING:
        return [*_LIFETIME, _KEY, *_RESUME]
    return [*_LIFETIME, _KEY] if path == "/v1/embeddings" else [*_LIFETIME]


def document_keys(app: FastAPI, open_paths: Set[str]) -> None:
    """Adds to the OpenAPI document that all paths but the open ones need an API key."""

    def amend(document: dict[str, Any]) -> None:
        _components(document, "securitySchemes").update(
            apiKey={"type": "http", "scheme": "bearer"},
            xApiKey={"type": "apiKey", "in": "header", "name": "x-api-key"},
        )
        document["security"] = [{"apiKey": []}, {"xApiKey": []}]
        for path in open_paths & document["paths"].keys():
            for operation in document["paths"][path].values():
                operation["security"] = []

    _amend(app, amend)
