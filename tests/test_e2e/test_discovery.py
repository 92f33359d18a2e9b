"""A gateway that was told of no model serves what engines register: real processes and Valkey."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import NotFoundError, OpenAI

from headrace_common.protocol.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis_registry import RedisModelRegistry
from headrace_testing.processes import until
from headrace_testing.stack import MODEL, EngineProcess, GatewayProcess
from headrace_testing.valkey import ValkeyServer

OWNER = "models/tiny"
TEMPLATE = "{% for m in messages %}hello {{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def gateway(
    valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    log = tmp_path_factory.mktemp("gateway") / "log"
    with GatewayProcess(None, valkey.url, log, "--log-format", "json") as process:
        process.await_log("gateway ready")
        yield process


def remove(valkey: ValkeyServer, owner: str) -> bool:
    async def ask() -> bool:
        connection = Connection(ConnectionConfig(url=valkey.url))
        try:
            return await RedisModelRegistry(connection).remove(MODEL, owner)
        finally:
            await connection.close()

    return asyncio.run(ask())


def prompt_tokens(gateway: GatewayProcess, text: str) -> int:
    body = {"prompt": text, "add_special_tokens": False}
    return int(httpx.post(f"{gateway.url}/tokenize", json=body, timeout=30).json()["count"])


def waiting(gateway: GatewayProcess) -> float:
    """Requests that wait for the model, as the autoscaler reads it."""
    text = httpx.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics", timeout=30).text
    found = re.search(rf'^headrace_queue_depth\{{[^}}]*"{MODEL}"[^}}]*\}} (\S+)$', text, re.M)
    return float(found[1]) if found else 0.0


def test_applying_a_model_is_all_it_takes(
    checkpoint: Path, valkey: ValkeyServer, gateway: GatewayProcess, tmp_path: Path
) -> None:
    client = OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0, timeout=120)
    assert list(client.models.list()) == []
    with pytest.raises(NotFoundError, match="none is registered yet"):
        client.completions.create(model=MODEL, prompt="x")

    template = tmp_path / "template"
    template.write_text(TEMPLATE)
    flags = ("--owner", OWNER, "--chat-template", str(template), "--max-model-len", "300")
    with EngineProcess(checkpoint, valkey.url, tmp_path / "engine", *flags) as engine:
        engine.await_log("engine ready")
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=4, temperature=0
        )
        assert answer.usage is not None and answer.usage.completion_tokens == 4
        assert answer.usage.prompt_tokens == prompt_tokens(gateway, "hello x")

    (model,) = client.models.list()
    assert (model.id, model.model_extra and model.model_extra["max_model_len"]) == (MODEL, 300)
    with httpx.Client(base_url=gateway.url, timeout=120) as http:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 4}
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as queued:
            assert queued.status_code == 200
            until(lambda: waiting(gateway) == 1, "the request to wait for an engine")

    assert not remove(valkey, "someone/else")
    assert remove(valkey, OWNER)
    until(lambda: list(client.models.list()) == [], "the model to be gone")
    with pytest.raises(NotFoundError):
        client.completions.create(model=MODEL, prompt="x")
    assert gateway.alive
