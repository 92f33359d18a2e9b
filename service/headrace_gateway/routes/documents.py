"""How routes whose bodies are parsed by ourselves appear in the OpenAPI document."""

from collections.abc import Set
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

_REF = "#/components/schemas/{model}"


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """What a route adds to its description; `document_bodies` says what the name means."""
    schema = {"$ref": _REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def document_bodies(app: FastAPI, kinds: tuple[type[BaseModel], ...]) -> None:
    """Adds the bodies' schemas to the application's OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for kind in kinds:
            schema = kind.model_json_schema(ref_template=_REF)
            schemas.update(schema.pop("$defs", {}))
            schemas[kind.__name__] = schema
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def document_keys(app: FastAPI, open_paths: Set[str]) -> None:
    """Says in the OpenAPI document that all other paths need an API key."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes["apiKey"] = {"type": "http", "scheme": "bearer"}
        document["security"] = [{"apiKey": []}]
        for path in open_paths & document["paths"].keys():
            for operation in document["paths"][path].values():
                operation["security"] = []
        return document

    app.openapi = openapi  # type: ignore[method-assign]
