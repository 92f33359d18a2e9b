"""The gateway follows its OpenAPI document: schemathesis sends every path the inputs that the
document describes. A real gateway over Valkey with a fake engine, in a separate thread. There is no
check that every input that fits the document is accepted: some limits concern several fields, which
the document cannot express."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from headrace_gateway.http.app import AppDependencies, create_app
from headrace_gateway.models.loading import load_static
from headrace_gateway.models.models import Models
from headrace_gateway.settings import GatewaySettings
from headrace_testing.backends import MODEL, OverRedis
from headrace_testing.batches import batch_gateway
from headrace_testing.fake_engine import FakeEngine
from headrace_testing.valkey import ValkeyServer

# Longest prompt plus output: a request without max_tokens generates up to this length.
SLOWEST_S = 240  # to wait for an answer, on a machine that has other things to do
MAX_MODEL_LEN = 64
# Fields that end answers that would otherwise not end.
ENDS: dict[str, dict[str, Any]] = {"/console/live": {"events": 1}}
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
    checks.allow_header_conformance,
]


def document() -> dict[str, Any]:
    """The document as a gateway serves it; it does not depend on models or engines."""
    unused: Any = None
    app = create_app(
        GatewaySettings(), AppDependencies(served=Models({}), client=unused, queue=unused)
    )
    return app.openapi()


DOCUMENT = document()


def cases() -> Iterator[tuple[str, str, GenerationMode]]:
    """Every operation with inputs that fit the document and, where possible, with inputs that do
    not."""
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            yield method, path, GenerationMode.POSITIVE
            names = {parameter["name"] for parameter in operation.get("parameters", ())}
            if "requestBody" in operation or "limit" in names:
                yield method, path, GenerationMode.NEGATIVE


@pytest.fixture(scope="module")
def url(checkpoint: Path, valkey: ValkeyServer) -> Iterator[str]:
    """A gateway that serves until the module's end."""
    found: list[str] = []
    ready = threading.Event()
    ended = asyncio.Event()

    async def serve() -> None:
        backend = OverRedis(valkey.url, block=0.2)
        await backend.wipe()
        chosen = GatewaySettings(model=str(checkpoint), served_model_name=MODEL)
        engine = FakeEngine(backend.engine(), MODEL, token_delay=0.0)
        running = asyncio.create_task(engine.run())
        limits: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "model": str(checkpoint)}
        served = Models(load_static(chosen))
        names = {**limits, "served_model_name": MODEL}
        async with batch_gateway(backend, served, "g1", **names) as http:
            found.append(str(http.base_url))
            ready.set()
            await ended.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await backend.close()

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        loop = runner.get_loop()
        thread = threading.Thread(target=runner.run, args=(serve(),))
        thread.start()
        assert ready.wait(60), "the gateway did not start"
        yield found[0]
        loop.call_soon_threadsafe(ended.set)
        thread.join()


@pytest.mark.parametrize(("method", "path", "mode"), list(cases()), ids=str)
def test_operations_match_the_openapi_document(
    url: str, method: str, path: str, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    schema.config.update(base_url=url)
    operation = schema[path][method]

    @settings(
        max_examples=3,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case[Any]) -> None:
        case.query.update(ENDS.get(path, {}))
        case.call_and_validate(base_url=url, checks=CHECKS, timeout=SLOWEST_S)

    ask()
