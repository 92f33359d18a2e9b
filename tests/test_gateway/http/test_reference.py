"""The OpenAPI document is valid and names the headers; /docs shows it without other sites."""

import re

import pytest
import schemathesis

from headrace_testing.gateway import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_document_is_valid_and_names_servers_and_headers(gateway: Gateway) -> None:
    document = gateway.app.openapi()
    assert (
        gateway.app.openapi() == document
        and len(document["paths"]["/health"]["get"]["parameters"]) == 1
    )
    schemathesis.openapi.from_dict(document).validate()

    assert document["servers"] == [{"url": "/", "description": "This gateway."}]
    read = {
        path: {
            each["name"].lower()
            for operation in operations.values()
            for each in operation["parameters"]
            if each["in"] == "header"
        }
        for path, operations in document["paths"].items()
    }
    lifetime = {"x-request-id", "x-request-timeout", "x-request-deadline"}
    resumed = {"idempotency-key", "x-resumable", "last-event-id"}
    assert read["/v1/chat/completions"] == lifetime | resumed
    assert read["/v1/embeddings"] == lifetime | {"idempotency-key"}
    assert read["/v1/rerank"] == lifetime
    assert read["/v1/requests/{request_id}/events"] == {"x-request-id", "last-event-id"}


async def test_the_page_has_every_route_and_loads_nothing(gateway: Gateway) -> None:
    answer = await gateway.http.get("/docs")

    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    document = (await gateway.http.get("/openapi.json")).json()
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"<code>{method.upper()} {path}</code>" in answer.text
    assert "<code>thinking_token_budget</code>" in answer.text
    assert "<script" not in answer.text and not re.search("(src|href)=.https?:", answer.text)
