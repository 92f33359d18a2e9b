"""Describes bodies that are not parsed by the framework in the OpenAPI document."""

from collections.abc import Callable, Mapping, Set
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

_REF = "#/components/schemas/{model}"
_TEXT = {"type": ["string", "null"]}
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
_EVENT = {
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
    """Returns what a route adds to its description; `document_bodies` defines the name."""
    schema = {"$ref": _REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _amend(app: FastAPI, amend: Callable[[dict[str, Any]], None]) -> None:
    """Has `amend` change the application's OpenAPI document whenever it is made."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
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
        name: field if name in required else {"anyOf": [field, null]}
        for name, field in schema["properties"].items()
    }
    return {**schema, "properties": fields, "additionalProperties": null}


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
                if path in _STREAMING and method == "get":
                    operation["responses"]["200"]["content"] = _whole_or_events()
                if path == "/console/live":
                    _document_live(responses)
                if path in _GENERATING:
                    _document_answers(responses)

    _amend(app, amend)


def _errors(path: str, *, writes: bool) -> dict[str, Any]:
    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    content = {"application/json": {"schema": {"$ref": _REF.format(model=name)}}}
    statuses = {**_READ_ERRORS, **(_WRITE_ERRORS if writes else {})}
    return {
        str(status): {"description": meaning, "content": content}
        for status, meaning in statuses.items()
    }


def _document_answers(responses: dict[str, Any]) -> None:
    responses["200"]["content"] = _whole_or_events()
    accepted = {"application/json": {"schema": {"type": "object"}}}
    responses["202"] = {"description": "The request runs in the background.", "content": accepted}


def _document_live(responses: dict[str, Any]) -> None:
    responses["200"]["content"] = {"text/event-stream": {"schema": _EVENT}}
    responses["429"] = {**responses["503"], "description": "Too many consoles watch."}


def _whole_or_events() -> dict[str, Any]:
    return {
        "application/json": {"schema": {"type": "object"}},
        "text/event-stream": {"schema": _EVENT},
    }


def document_keys(app: FastAPI, open_paths: Set[str]) -> None:
    """Adds to the OpenAPI document that all paths but the open ones need an API key."""

    def amend(document: dict[str, Any]) -> None:
        _components(document, "securitySchemes")["apiKey"] = {"type": "http", "scheme": "bearer"}
        document["security"] = [{"apiKey": []}]
        for path in open_paths & document["paths"].keys():
            for operation in document["paths"][path].values():
                operation["security"] = []

    _amend(app, amend)
