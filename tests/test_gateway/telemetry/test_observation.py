"""One request's trace, metrics and log line; and long prompts do not block the event loop."""

import logging
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from headrace_common.observability.telemetry import Telemetry
from headrace_gateway.generation.prompts import PromptEncoder
from headrace_gateway.generation.rendering import Rendering
from headrace_gateway.http.app import AppDependencies, create_app
from headrace_gateway.limits.work import INLINE_SIZE, WorkPool
from headrace_gateway.models.loading import load_static
from headrace_gateway.models.models import Models, ServedModel
from headrace_gateway.settings import GatewaySettings
from headrace_testing.gateway import MODEL, Gateway, ScriptedEngine, running
from headrace_testing.images import image_intake
from headrace_testing.telemetry import SpanMemory

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRACE = "0af7651916cd43dd8448eb211c80319c"


async def test_a_request_is_traced_measured_and_logged(
    checkpoint: Path, gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    spans, reader = SpanMemory(), InMemoryMetricReader()
    meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("test")
    settings = GatewaySettings(
        model=str(checkpoint), served_model_name=MODEL, port=0, drain_timeout=0
    )
    served = Models(load_static(settings))
    engine = ScriptedEngine(served.get(MODEL).tokenizer)
    telemetry = Telemetry(meter=meter, tracer=spans.tracer, tracing=True, measuring=True)
    deps = AppDependencies(served=served, client=engine, queue=engine, telemetry=telemetry)
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-request-id": "mine"}
    with caplog.at_level(logging.INFO, "headrace_gateway.telemetry.observation"):
        async with running(create_app(settings, deps), settings) as (_, port):
            answer = await gateway.http.post(
                f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "Hi"}, headers=headers
            )

    request = engine.submitted[0]
    tokens = answer.json()["usage"]["completion_tokens"]
    span = spans.spans[f"text_completion {MODEL}"]
    assert span.attributes is not None
    assert request.trace["traceparent"].startswith(f"00-{TRACE}-{span.context.span_id:016x}")
    assert span.attributes["gen_ai.usage.output_tokens"] == tokens
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert {"gen_ai.server.request.duration", "gen_ai.server.time_to_first_token"} <= names(reader)
    (line,) = [vars(each) for each in caplog.records if each.message == "request ended"]
    assert (line["request_id"], line["client_request_id"]) == (request.request_id, "mine")
    assert (line["trace_id"], line["output_tokens"]) == (TRACE, tokens)


def names(reader: InMemoryMetricReader) -> set[str]:
    data = reader.get_metrics_data()
    assert data is not None
    scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
    return {metric.name for scope in scopes for metric in scope.metrics}


class Watched(ThreadPoolExecutor):
    """Counts the calls."""

    def __init__(self) -> None:
        super().__init__(1)
        self.threads: list[str] = []

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Any:
        def noted() -> Any:
            self.threads.append(threading.current_thread().name)
            return work(*args, **kwargs)

        return super().submit(noted)


@pytest.mark.parametrize(("chars", "threads"), [(INLINE_SIZE, 0), (INLINE_SIZE + 1, 1)])
async def test_long_prompts_are_tokenized_in_threads(
    gateway: Gateway, chars: int, threads: int
) -> None:
    model = served_model(gateway)
    with Watched() as executor:
        ids = await encode(executor, model, "x" * chars)

    assert len(executor.threads) == threads
    assert model.tokenizer.decode(ids) == "x" * chars


def served_model(gateway: Gateway) -> ServedModel:
    model: ServedModel = gateway.app.state.services.models.get(MODEL)
    return model


async def encode(executor: Executor, model: ServedModel, text: str) -> list[int]:
    work = WorkPool(executor, 1).of("")
    prompts = PromptEncoder(work, Rendering(), image_intake())
    return await prompts.text(model, text, add_special_tokens=False)
