"""GET /openapi.json, and GET /docs: the same as a page without scripts and other sites' files."""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

router = APIRouter()

_STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;"
    "margin:2rem auto;padding:0 1rem}code{font-family:ui-monospace,monospace}"
    "details{border:1px solid #8886;border-radius:6px;margin:.5rem 0;padding:.5rem .75rem}"
    "summary{cursor:pointer}table{border-collapse:collapse;width:100%}"
    "th,td{text-align:left;vertical-align:top;padding:.25rem .5rem;border-top:1px solid #8884}"
)
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_DIGEST}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


@router.get("/openapi.json")
async def document(request: Request) -> Response:
    """Describes every route for programs, as OpenAPI 3.1."""
    state = request.app.state
    if not hasattr(state, "document"):
        state.document = json.dumps(request.app.openapi(), separators=(",", ":")).encode()
    return Response(state.document, media_type="application/json")


@router.get("/docs", response_class=HTMLResponse)
async def reference(request: Request) -> HTMLResponse:
    """Shows every route with its fields, headers and answers."""
    state = request.app.state
    if not hasattr(state, "reference"):
        state.reference = "".join(_page(request.app.openapi()))
    return HTMLResponse(state.reference, headers=_HEADERS)


def _page(document: Mapping[str, Any]) -> Iterator[str]:
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    yield (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><main><h1>{title}</h1><p>The same as a file for programs: "
        '<a href="/openapi.json">/openapi.json</a>.</p>'
    )
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield from _operation(document, f"{method.upper()} {path}", operation)
    yield "</main></body></html>"


def _operation(
    document: Mapping[str, Any], name: str, operation: Mapping[str, Any]
) -> Iterator[str]:
    description = escape(operation.get("description", ""))
    yield f"<details><summary><code>{escape(name)}</code></summary><p>{description}</p>"
    rows = [
        (each["name"], each["in"], each["schema"], each.get("required", False), each)
        for each in operation.get("parameters", ())
    ]
    for media in operation.get("requestBody", {}).get("content", {}).values():
        body = _resolved(document, media["schema"])
        required = body.get("required", ())
        rows += [
            (field, "body", schema, field in required, schema)
            for field, schema in body.get("properties", {}).items()
        ]
    if rows:
        yield "<table><thead><tr><th>name</th><th>in</th><th>type</th><th></th></tr></thead><tbody>"
        for field, place, schema, needed, described in rows:
            yield (
                f"<tr><td><code>{escape(field)}</code>{' (required)' if needed else ''}</td>"
                f"<td>{place}</td><td>{escape(_type(schema))}</td>"
                f"<td>{escape(described.get('description', ''))}</td></tr>"
            )
        yield "</tbody></table>"
    yield "<p>Answers:</p><ul>"
    for status, answer in operation["responses"].items():
        media = answer.get("content", {}).get("application/json", {})
        kind = f" ({escape(_type(media['schema']))})" if media.get("schema") else ""
        yield (
            f"<li><code>{escape(status)}</code> {escape(answer.get('description', ''))}{kind}</li>"
        )
    yield "</ul></details>"


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" not in schema:
        return schema
    found: Mapping[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def _type(schema: Mapping[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_type, options)))
    if values := schema.get("enum"):
        return " or ".join(map(repr, values))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return " or ".join(kind) if isinstance(kind, list) else str(schema.get("const", kind))
