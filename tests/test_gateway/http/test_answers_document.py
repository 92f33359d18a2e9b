"""Answers in the OpenAPI document: typed, and as the schemas of OpenAPI 3.1 want them."""

from typing import Any

from openapi_spec_validator import OpenAPIV31SpecValidator

from headrace_gateway.schemas import answers
from headrace_testing.gateway import Gateway

# What has no type: the page, files' bytes, and events that are replayed.
UNTYPED = {
    ("get", "/docs"),
    ("get", "/v1/files/{file_id}/content"),
    ("get", "/v1/requests/{request_id}/events"),
    ("get", "/console/live"),
}


def test_the_document_is_valid_openapi(gateway: Gateway) -> None:
    document = gateway.app.openapi()

    assert document["openapi"].startswith("3.1")
    assert [error.message for error in OpenAPIV31SpecValidator(document).iter_errors()] == []


def test_every_answer_in_json_has_a_type_with_fields(gateway: Gateway) -> None:
    document = gateway.app.openapi()
    untyped = {
        (method, path)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if not all(fields_of(document, answer) for answer in successes(operation))
    }

    assert untyped == UNTYPED


def test_a_type_of_an_answer_is_not_one_of_a_request(gateway: Gateway) -> None:
    schemas = gateway.app.openapi()["components"]["schemas"]
    for name in schemas.keys() & vars(answers).keys():
        fields = vars(answers)[name].__annotations__.keys()
        assert fields <= schemas[name]["properties"].keys(), name


def successes(operation: dict[str, Any]) -> list[dict[str, Any]]:
    return [answer for status, answer in operation["responses"].items() if status[0] == "2"]


def fields_of(document: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Whether the answer in JSON is an object of the document, or one of several."""
    schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
    named = schema.get("anyOf", [schema])
    schemas = document["components"]["schemas"]
    return all(
        schemas.get(each.get("$ref", "").rpartition("/")[2], {}).get("properties") for each in named
    )
